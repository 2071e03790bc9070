"""KTO: its loss by the paper's words, what moves, and files of labels."""

import json
import math
from pathlib import Path

import pytest
import torch
from agent_worlds import PREFERENCES
from tiny_worlds import load_policy

from alpacafarm_env.agents import KTO, KTOConfig
from alpacafarm_env.agents.kto import kto_loss, labelled
from alpacafarm_env.data import read_labels
from alpacafarm_env.errors import DataError
from alpacafarm_env.instructions import Instruction, Labelled

ROWS = [each for pair in PREFERENCES for each in labelled(pair)]


def agent_of(folder: Path, examples: object = PREFERENCES, **changes: object) -> KTO:
    settings = {"learning_rate": 3e-3, "epochs": 8, "batch_size": 4, "warmup_steps": 0, **changes}
    return KTO(load_policy(folder, max_response_tokens=32), examples, config=KTOConfig(**settings))


def test_the_loss_is_the_papers() -> None:
    config = KTOConfig(beta=0.5, good_weight=2.0, bad_weight=3.0)
    ratios, good = torch.tensor([1.0, -2.0, 0.4], dtype=torch.float64), torch.tensor([True, True, False])

    def sigma(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    expected = [2 * (1 - sigma(0.5 * 0.7)), 2 * (1 - sigma(0.5 * -2.3)), 3 * (1 - sigma(0.5 * -0.1))]
    assert kto_loss(ratios, good, 0.3, config).tolist() == pytest.approx(expected)


def test_good_responses_become_likelier_and_bad_ones_less(policy_folder: Path) -> None:
    metrics = list(agent_of(policy_folder).updates())
    assert metrics[0]["margin"] == pytest.approx(0, abs=1e-4)  # the policy is the reference
    assert metrics[0]["loss"] == pytest.approx(0.5, abs=1e-3)
    last = metrics[-4:]
    assert min(each["margin"] for each in last) > 0.1
    assert sum(each["loss"] for each in last) / 4 < 0.49
    assert all(each["kl"] >= 0 for each in metrics)


def test_labels_count_as_given_and_need_no_pairs(policy_folder: Path) -> None:
    straight, turned = (
        list(agent_of(policy_folder, [Labelled(x.instruction, x.response, x.label ^ turn) for x in ROWS]).updates())
        for turn in (False, True)
    )
    assert straight[-1]["loss"] != turned[-1]["loss"]
    only_good = list(agent_of(policy_folder, [x for x in ROWS if x.label], bad_weight=0.0).updates())
    assert all(math.isfinite(value) for each in only_good for value in each.values())
    with pytest.raises(ValueError, match="two responses"):
        agent_of(policy_folder, ROWS[:1])


def test_files_of_labels(tmp_path: Path) -> None:
    """In our fields and in TRL's; what is no label is told by its record."""
    rows = [
        {"instruction": "Say hi.", "input": "", "output": "hi", "label": True},
        {"prompt": "Say no.", "completion": " no", "label": False},
        {"messages": [{"role": "user", "content": "Ask"}, {"role": "assistant", "content": "What?"}], "kto_tag": True},
    ]
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_labels(path)
    assert [(str(each.instruction), each.response, each.label) for each in read] == [
        ("Say hi.", "hi", True),
        ("Say no.", " no", False),
        ("Ask", "What?", True),
    ]
    path.write_text(json.dumps({**rows[0], "label": "yes"}))
    with pytest.raises(DataError, match="label"):
        read_labels(path)
    path.write_text(json.dumps({key: value for key, value in rows[0].items() if key != "label"}))
    with pytest.raises(DataError, match="label"):
        read_labels(path)
    with pytest.raises(ValueError, match="label"):
        Labelled(Instruction("x"), "y", 1)
