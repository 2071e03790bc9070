"""The promises of every agent, as functions of what makes a fresh one: `make(policy_folder, out=None, seed=0)`.

A trained agent's `updates` end after at least four steps, and its checkpoints are written every second one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_worlds import TEXTS

Make = Callable[..., Any]


def check_answers(make: Make, policy: Path) -> None:
    """A response an instruction; the seed decides it."""
    agent = make(policy)
    answers = agent.act(TEXTS)
    assert len(answers) == len(TEXTS)
    assert all(isinstance(answer, str) for answer in answers)
    assert agent.act(TEXTS) == answers == make(policy).act(list(TEXTS))
    assert make(policy, seed=1).act(TEXTS) != answers
    assert agent.act(()) == ()


def check_order(make: Make, policy: Path) -> None:
    """An answer stands in its instruction's place and depends on no other: best-of-n promises it, greedy agents too."""
    answers = make(policy).act(TEXTS)
    assert len(set(answers)) > 1
    assert make(policy).act(TEXTS[::-1]) == answers[::-1]
    assert tuple(make(policy).act([text])[0] for text in TEXTS) == answers


def check_saving(make: Make, policy: Path, other_policy: Path, folder: Path) -> None:
    """What is saved answers the same: read into an agent that began elsewhere, and as a policy to begin with."""
    agent, loaded = make(policy), make(other_policy)
    list(getattr(agent, "updates", tuple)())
    agent.save(folder)
    answers = agent.act(TEXTS)
    assert loaded.act(TEXTS) != answers
    loaded.load(folder)
    assert loaded.act(TEXTS) == make(folder).act(TEXTS) == answers


def check_training(make: Make, policy: Path) -> None:
    """Steps are counted, metrics are numbers, the model moves; equal seeds train equally, another one does not."""
    agent = make(policy)
    before = {name: tensor.clone() for name, tensor in agent.policy.model.state_dict().items()}
    first = list(agent.updates())
    assert [metrics["step"] for metrics in first] == list(range(1, len(first) + 1))
    assert all(math.isfinite(value) for metrics in first for value in metrics.values())
    assert any(not torch.equal(before[name], tensor) for name, tensor in agent.policy.model.state_dict().items())
    assert list(make(policy).updates()) == first != list(make(policy, seed=1).updates())


def check_resuming(make: Make, policy: Path, folder: Path, *, stop: int = 3) -> None:
    """Stopped one step beyond a checkpoint and called again, a run leaves the very files of a whole one."""
    whole = int(make(policy, folder / "whole").learn()["step"])
    for metrics in make(policy, folder / "parts").updates():
        if metrics["step"] == stop:
            break
    steps = [metrics["step"] for metrics in make(policy, folder / "parts").updates()]
    assert steps in ([*range(stop, whole + 1)], [*range(stop + 1, whole + 1)])  # samples may be kept every step
    assert make(policy, folder / "parts").learn() == {}
    assert files(folder / "parts") == files(folder / "whole") != {}


def check_same_training(one: Path, two: Path, *, atol: float) -> None:
    """Runs of one process and of two say and leave the same, weights within `atol`."""
    named = {path.relative_to(one) for path in one.rglob("*") if path.name in ("metrics.jsonl", "model.safetensors")}
    assert {path.suffix for path in named} == {".jsonl", ".safetensors"}
    for path in named:
        if path.suffix == ".jsonl":
            lines = [[json.loads(line) for line in (run / path).read_text().splitlines()] for run in (two, one)]
            assert len(lines[0]) == len(lines[1])
            for found, expected in zip(*lines, strict=True):
                assert found == pytest.approx(expected, rel=1e-3, abs=1e-3), path
        else:
            found, expected = load_file(two / path), load_file(one / path)
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=f"{path}: {name}")


def files(out: Path) -> dict[str, bytes]:
    """Everything a run leaves that sampling and training decide."""
    kept = [
        path for path in out.rglob("*") if path.suffix in (".safetensors", ".jsonl") and path.name != "timing.jsonl"
    ]
    return {str(path.relative_to(out)): path.read_bytes() for path in kept}
