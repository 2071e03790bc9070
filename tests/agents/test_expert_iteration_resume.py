"""Expert iteration that is stopped, killed, shared or damaged ends as if it had not been."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_worlds import DEADLINE_S, INSTRUCTIONS, Counting, files, weights
from agent_worlds import make_expert_iteration as make
from agent_worlds import small_expert as small
from agent_worlds import train_expert_iteration as train
from tiny_models import TEMPLATE, build_llama
from tiny_worlds import ASCII, TEXTS, Share, load_policy, start
from transformers import PreTrainedTokenizerFast

from alpacafarm_env.agents.expert_iteration import ExpertIteration
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.errors import CheckpointError


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(scope="module")
def whole(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> ExpertIteration:
    """A run nothing happened to."""
    policy = LanguageModel(build_llama(len(tokenizer)), tokenizer, TEMPLATE, max_response_tokens=4)
    agent = make(policy, tmp_path_factory.mktemp("whole"))
    agent.learn()
    return agent


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_run_stopped_after_any_step_ends_as_if_it_had_not_been(
    policy_folder: Path, out: Path, whole: ExpertIteration, stop: int
) -> None:
    for metrics in make(policy_folder, out).updates():
        if metrics["step"] == stop:
            break
    resumed = make(policy_folder, out)
    # Sampling loses nothing; of the SFT's 4 updates the first and the third are not saved.
    in_round = stop % 7
    assert resumed.step == stop - (in_round in (4, 6))
    steps = [metrics["step"] for metrics in resumed.updates()]
    assert steps == list(range(stop - (in_round in (4, 6)) + 1, 15))
    assert whole.out is not None
    assert files(out) == files(whole.out)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(resumed).items())


def test_a_killed_process_is_resumed(policy_folder: Path, out: Path, whole: ExpertIteration) -> None:
    metrics = out / "metrics.jsonl"

    def num_steps() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    for step in (1, 4):  # while sampling, while training
        process = start(train, policy_folder, out)
        deadline = time.monotonic() + DEADLINE_S
        while num_steps() < step and process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    make(policy_folder, out).learn()
    assert whole.out is not None
    assert files(out) == files(whole.out)


def test_stored_chunks_are_not_sampled_again(policy_folder: Path, out: Path) -> None:
    first, second = Counting(), Counting()
    updates = make(policy_folder, out, oracle=first).updates()
    next(updates), next(updates)
    del updates  # while it may go on, the folder is its own
    make(policy_folder, out, oracle=second, config=small()).learn()
    assert first.asked == list(TEXTS[:4])
    assert second.asked == [TEXTS[4], *TEXTS]
    third = Counting()
    assert make(policy_folder, out, oracle=third).learn() == {}
    assert third.asked == []


def test_a_damaged_chunk_costs_its_samples_but_not_the_result(
    policy_folder: Path, out: Path, whole: ExpertIteration
) -> None:
    make(policy_folder, out).learn()
    damaged = out / "round-1" / "chunk-00001" / "best.jsonl"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"Sampling a chunk again: .*chunk-00001 is damaged: best.jsonl"):
        resumed = make(policy_folder, out)
    resumed.learn()
    assert whole.out is not None
    assert files(out) == files(whole.out)
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(resumed).items())


def test_what_a_killed_run_leaves_is_removed(policy_folder: Path, out: Path) -> None:
    next(make(policy_folder, out).updates())
    draft = out / "round-1" / ".chunk-00001.123.tmp"
    draft.mkdir()
    make(policy_folder, out)
    assert not draft.exists()


def test_what_decides_nothing_may_change(policy_folder: Path, out: Path, whole: ExpertIteration) -> None:
    """As after running out of memory while sampling: fewer rows at once, and the same result."""
    next(make(policy_folder, out, config=small(sample_batch_size=16)).updates())
    make(policy_folder, out, config=small(sample_batch_size=3, act_temperature=0.0)).learn()
    assert whole.out is not None
    assert files(out) == files(whole.out)
    make(policy_folder, out, config=small(sft=replace(small().sft, save_every=1)))


def test_another_run_is_refused_by_what_differs(policy_folder: Path, out: Path) -> None:
    next(make(policy_folder, out).updates())

    def refused(said: str, policy: LanguageModel | Path = policy_folder, **changes: Any) -> None:
        with pytest.raises(CheckpointError, match=rf"was trained with other settings. Changed: {said}\. Set them back"):
            make(policy, out, **changes)

    refused("num_samples: 4 -> 8", config=small(num_samples=8))
    refused("sft.epochs: 2 -> 3", config=small(sft=replace(small().sft, epochs=3)))
    refused("seed: 3 -> 4", seed=4)
    refused(r"instructions_sha256: '\w{64}' -> '\w{64}'", instructions=INSTRUCTIONS[::-1])
    louder = Share(ASCII)
    louder.name = "louder"
    refused("oracle: 'share' -> 'louder'", oracle=louder)
    other = load_policy(policy_folder)
    with torch.no_grad():
        other.model.lm_head.weight[0, 0] += 1e-3
    refused(r"policy_sha256: '\w{64}' -> '\w{64}'", policy=other)
    with pytest.raises(CheckpointError, match=r"holds a run \(round-1\), and resume='never' would overwrite it"):
        make(policy_folder, out, resume="never")
    (out / "config.json").unlink()
    with pytest.raises(CheckpointError, match="Cannot read .*config.json"):
        make(policy_folder, out)


# Settings -------------------------------------------------------------------------------------------------------------
