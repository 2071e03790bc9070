"""Rows one behind the other, without pads: the numbers of padded ones, wherever a large model on a CPU reads rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from agent_worlds import make_wide
from tiny_worlds import LORA, load_policy

from alpacafarm_env.agents import attention
from alpacafarm_env.agents.attention import packs
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.rollouts import micro_batches


@pytest.fixture
def read_packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each pass of rows without pads, of however small a model."""
    seen: list[int] = []
    attend = attention._forward

    def counting(layer: Any, *args: Any, packed_lengths: list[int] | None = None, **kwargs: Any) -> Any:
        seen.extend([len(packed_lengths)] if packed_lengths else [])
        return attend(layer, *args, packed_lengths=packed_lengths, **kwargs)

    monkeypatch.setattr(attention, "_forward", counting)
    return seen


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"precision": "bfloat16"}])
@pytest.mark.parametrize("name", ["sft", "dpo", "reward", "ppo"])
def test_it_learns_what_padded_rows_teach(
    name: str, changes: dict[str, Any], policy_folder: Path, read_packed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = [metrics["loss"] for metrics in make_wide(name, policy_folder, LORA, **changes).updates()]
    assert not read_packed  # a small model's numbers stay
    monkeypatch.setattr(attention, "SMALL", 0)
    packed = [metrics["loss"] for metrics in make_wide(name, policy_folder, LORA, **changes).updates()]
    assert max(read_packed) > 1
    assert len(set(padded)) > 1
    assert packed == pytest.approx(padded, rel=0.05 if "precision" in changes else 1e-3, abs=1e-4)


def test_only_models_whose_attention_tells_rows_apart_read_them_so(
    policy_folder: Path, language_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SMALL", 0)
    assert packs(load_policy(policy_folder, lora=LORA).model)
    assert not packs(language_model.model)  # of either architecture, as transformers wrote them


def test_packed_rows_are_within_their_sum_and_each_there_once() -> None:
    lengths = torch.tensor([30, 100, 5, 70, 120, 25])
    cut = micro_batches(lengths, 100, packed=True)
    assert sorted(torch.cat(cut).tolist()) == list(range(6))
    assert [lengths[rows].tolist() for rows in cut] == [[120], [100], [70, 30], [25, 5]]


def test_no_row_sees_another(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(policy_folder, max_response_tokens=40, lora=LORA)
    rollouts = policy.as_rollouts(["one", "two and three", "four"], ["first", "second answer", "x"])
    alone = torch.cat([policy.logprobs(rollouts[torch.tensor([row])]) for row in range(3)])
    monkeypatch.setattr(attention, "SMALL", 0)
    torch.testing.assert_close(policy.logprobs(rollouts), alone, atol=1e-5, rtol=1e-5)
