"""What a user brings to the win-rate curve - data, policy, reward model - checked before anything is written or run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ... import pretrained
from ...chat_templates import load_template
from ...errors import DataError
from ...folders import check_model
from ...oracles.registry import make_oracle
from ..harness.own_judge import make_own_judge, refuse_trained_on
from .plan import RunPlan

UNKNOWN_POSITIONS = 2048
"""Taken for a model whose configuration does not say how many positions it knows."""


def check_inputs(plan: RunPlan) -> None:
    """Reads the splits and the models' configurations and measures every prompt.

    Raises:
        DataError: A split is faulty; a prompt of val or eval, which are answered in full, does not fit the models;
            every one of unlabeled is longer than `prompt_limit`; or micro-batches are too small for them.
        CheckpointError: Policy or reward model is not there or cannot be used.
    """
    from ...agents.fitting import check_budget, prompt_lengths

    dataset = plan.dataset
    instructions = {split: dataset.instructions(split) for split in ("unlabeled", "val", "eval")}
    plan.sources["--policy"]()  # fetches it, where it is the hub's
    make_oracle(plan.proxy, dataset=dataset)
    if plan.judge is not None:
        make_own_judge(plan.judge, dataset)
        refuse_trained_on(plan.judge, plan.sources["--reward-model"]())
    tokenizer = load_tokenizer(plan.model_folders[0])
    room, limit = prompt_room(plan), prompt_limit(plan)
    template = load_template(plan.model_folders[0], tokenizer, plan.policy_template)
    lengths = {split: prompt_lengths(tokenizer, template, asked) for split, asked in instructions.items()}
    for split in ("val", "eval"):
        _check_prompts(plan, split, lengths[split], room)
    if not (trained := [length for length in lengths["unlabeled"] if length <= limit]):
        _check_prompts(plan, "unlabeled", lengths["unlabeled"], limit)  # some PPO leaves out by itself, with a warning
    longest = max(trained) + plan.max_response_tokens
    check_budget(plan.ppo_config().micro_batch_tokens, longest, who="--micro-batch-tokens")


def prompt_room(plan: RunPlan) -> int:
    """Tokens that a prompt may have to be answered: all that the longest response leaves free.

    Policy and value model (it starts from the reward model) both read prompt and response, so the one that knows fewer
    positions decides.

    Raises:
        DataError: Prompt and response together do not fit.
        CheckpointError: A model's configuration cannot be read.
    """
    positions, width = min(num_positions(folder) for folder in plan.model_folders), plan.max_response_tokens
    if positions <= width:
        raise DataError(
            f"--policy and --reward-model: expected more than {width} positions, the longest response of --preset "
            f"{plan.preset}, got {positions} (max_position_embeddings); choose another --preset or larger models"
        )
    return positions - width


def prompt_limit(plan: RunPlan) -> int:
    """Tokens that a prompt may have to be trained on: `max_prompt_tokens`, or all that can be answered.

    Raises:
        DataError: More than can be answered are asked for.
        CheckpointError: A model's configuration cannot be read.
    """
    room = prompt_room(plan)
    if plan.max_prompt_tokens is not None and plan.max_prompt_tokens > room:
        raise DataError(
            f"--max-prompt-tokens: expected at most {room} (the models' positions, less {plan.max_response_tokens} of "
            f"the longest response), got {plan.max_prompt_tokens}"
        )
    return plan.max_prompt_tokens or room


def num_positions(folder: str) -> int:
    """Positions that a model knows, by its configuration (of a LoRA adapter: its base model's)."""
    is_adapter = (Path(folder) / "adapter_config.json").is_file()
    config = pretrained.load_config(pretrained.adapter_base(folder) if is_adapter else folder).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or UNKNOWN_POSITIONS)


def load_tokenizer(folder: str) -> Any:
    """The policy's tokenizer, which needs an end-of-sequence and a padding token that differ."""
    from ...agents.language_model import check_special_tokens

    check_model(folder)
    tokenizer = pretrained.load_tokenizer(folder)
    with pretrained.reading(folder, "a language model's tokenizer"):
        check_special_tokens(tokenizer)
    return tokenizer


def _check_prompts(plan: RunPlan, split: str, lengths: list[int], limit: int) -> None:
    if too_long := [length for length in lengths if length > limit]:
        raise DataError(
            f"{plan.data}: expected prompts of at most {limit} tokens, but {len(too_long)} of {len(lengths)} in "
            f"{split} have more, the longest {max(too_long)}. Leave them out of the data (a prompt is never cut), or "
            "take models of more positions or, to train on them, a larger --max-prompt-tokens; the default is the "
            "models' positions less the longest response"
        )
