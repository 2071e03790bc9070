"""A policy in this process, as an oracle asks it: an agent, a language model or a folder; known by what it can do.

The agents lie above the oracles, so nothing of theirs is imported here; a folder is loaded by the name of their class,
as Gymnasium makes environments by the names of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final

from ..folders import check_model
from ..plugins import find_attribute
from .reward_model import batches, tokens_at_once

if TYPE_CHECKING:
    from torch import Tensor

LANGUAGE_MODEL: Final = "alpacafarm_env.agents.language_model:LanguageModel"
_ABLE: Final = ("generate", "as_rollouts", "logits", "encode_responses")
_ROWS: Final = 256
"""Most prompts in one forward pass."""


def check_policy(policy: object) -> None:
    """Refuses what can be no policy: TypeError for an object, CheckpointError for a folder that is not there."""
    if isinstance(policy, str | PathLike):
        check_model(policy if isinstance(policy, str) else fspath(policy))
    elif isinstance(policy, type) or not _is_model(getattr(policy, "policy", policy)):
        raise TypeError(
            "A policy that judges is an agent with a language model in this process, a LanguageModel or the folder of "
            f"one, got {'the class ' if isinstance(policy, type) else ''}{policy!r}."
        )


def language_model(policy: object) -> Any:
    """The language model of an agent, the one in a folder, loaded, or the model itself. Errors as of `check_policy`.

    An agent's is its own: one that learns answers as it has learned to, and has another opinion after each update.
    """
    check_policy(policy)
    if not isinstance(policy, str | PathLike):
        return getattr(policy, "policy", policy)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return find_attribute("Policy", LANGUAGE_MODEL).from_pretrained(policy, device=device)


def too_long(policy: Any, instructions: Sequence[str]) -> list[str]:
    """Of each instruction, why the policy cannot read its prompt, [B]; "" if it can. No prompt is ever cut."""
    limit, lengths = policy.max_prompt_tokens, _prompt_lengths(policy, instructions)
    text = "the prompt has {} tokens, and the policy reads {} (max_prompt_tokens) at most"
    return [text.format(length, limit) if length > limit else "" for length in lengths]


def first_token_logprobs(policy: Any, instructions: Sequence[str]) -> Iterator[tuple[list[int], Tensor]]:
    """Log-probabilities of every token as the first of an answer, at temperature 1.

    Yields:
        The numbers of b instructions, of similar length, and theirs: float32 [b, V], on the policy's device.
    """
    import torch

    with torch.no_grad():
        for rows in batches(_prompt_lengths(policy, instructions), _ROWS, tokens_at_once(policy.device)):
            asked = policy.as_rollouts([instructions[row] for row in rows], [""] * len(rows))  # one token each, the end
            yield rows, policy.logits(asked).log_softmax(-1)


def _prompt_lengths(policy: Any, instructions: Sequence[str]) -> list[int]:
    return [len(prompt) for prompt in policy.template.encode_prompts(policy.tokenizer, instructions)]


def _is_model(found: object) -> bool:
    return all(callable(getattr(found, name, None)) for name in _ABLE)
