"""A policy in this process as an oracle: how it is asked, and `PolicyRating`, for which it rates from 1 to 7.

A policy is an agent, a language model or a folder; known by what it can do. The agents lie above the oracles, so
nothing of theirs is imported here; a folder is loaded by the name of their class, as Gymnasium makes environments by
the names of theirs.

A policy that rates is asked in one sentence, which a small one can read.
Source: Yuan et al. 2024, "Self-Rewarding Language Models" (arXiv 2401.10020): one model answers instructions and, asked
in words, rates answers, its own too; it learns to rate from ratings as it learns to answer from demonstrations.
Deviations:

1. Their prompt describes a scale of 0 to 5 point by point and asks for a reasoned text. Ours is one sentence, the scale
   that of `Rating`, and the answer one digit.
2. They sample several texts and average the ratings in them, which estimates the expectation of the rating with the
   noise of a few draws. Of an answer that is one digit the expectation is known: the sum of each rating times its
   probability. It is the number that their average comes to with more and more draws, in one forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from typing import Any, Final

import numpy as np

from ..folders import check_model
from ..instructions import RATINGS, Demonstration, Instruction, Rating
from ..plugins import find_attribute
from .base import UNSCORED_REASON, DetailedOracle, Verdicts
from .reward_model import batches, tokens_at_once

ASKED: Final = "Rate this response from 1 to 7."
LEAST_MASS: Final = 0.5
"""Least probability of all ratings together for the first token to count as an answer."""
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


def _is_model(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in _ABLE)


def rating_question(instruction: str, response: str) -> Instruction:
    """The instruction that asks for a rating of a response; its input holds the two texts, the response last."""
    return Instruction(ASKED, f"{instruction}\nResponse: {response}")


def rating_demonstrations(ratings: Iterable[Rating]) -> list[Demonstration]:
    """Ratings as demonstrations of how to rate, "evaluation fine-tuning" data: mix them into those of SFT."""
    return [Demonstration(rating_question(each.instruction, each.response), str(each.rating)) for each in ratings]


class PolicyRating(DetailedOracle):
    """Scores a response by the rating that a policy expects of itself, 1 to 7, when asked by `rating_question`.

    The expectation is over the seven digits, by their probabilities as the first token of the policy's answer at
    temperature 1. The policy is read as it is when it is asked: while it learns, so does the judge. For a judge that
    stays as it is, save the policy and give the folder.

    Args:
        policy: An agent with a language model in this process, a `LanguageModel`, or the folder of one.

    Raises:
        TypeError, CheckpointError: `policy` is none.
        ValueError: Its tokenizer does not tell the digits apart by their first tokens.
    """

    name: Final = "rating:policy"

    def __init__(self, policy: Any) -> None:
        self._policy = language_model(policy)
        answers = self._policy.encode_responses([str(rating) for rating in RATINGS], eos=False)
        self._digits = [answer[0] for answer in answers]
        if (num_tokens := len(set(self._digits))) < len(RATINGS):
            raise ValueError(
                f"A policy rates by the first token of its answer, but its tokenizer begins the answers {RATINGS[0]} "
                f"to {RATINGS[-1]} with {num_tokens} different tokens. Take one with a token for each digit."
            )

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """Expected ratings [B], 1 to 7.

        NaN, with the reason as detail `unscored_reason`, for a prompt that the policy cannot read, or where its first
        token is less than likely to be a rating: it has not learned to rate.
        """
        import torch

        policy, questions = self._policy, [rating_question(x, y) for x, y in zip(instructions, responses, strict=True)]
        lengths = [len(prompt) for prompt in policy.template.encode_prompts(policy.tokenizer, questions)]
        limit, text = policy.max_prompt_tokens, "the prompt has {} tokens, and the policy reads {} (max_prompt_tokens)"
        reasons = [text.format(length, limit) if length > limit else "" for length in lengths]
        scores, readable = np.full(len(questions), np.nan), [row for row, reason in enumerate(reasons) if not reason]
        with torch.no_grad():
            for batch in batches([lengths[row] for row in readable], _ROWS, tokens_at_once(policy.device)):
                rows = [readable[index] for index in batch]
                # One token each, the end: the logits are those of the answer's first token.
                rollouts = policy.as_rollouts([questions[row] for row in rows], [""] * len(rows))
                logprobs = policy.logits(rollouts).log_softmax(-1)[:, self._digits]
                for row, chances in zip(rows, logprobs.double().exp().cpu().numpy(), strict=True):
                    mass = float(chances.sum())
                    if mass >= LEAST_MASS:
                        scores[row] = float(chances @ np.array(RATINGS)) / mass
                    else:
                        reasons[row] = f"the first token is a rating with a probability of {mass:.2g}, below 0.5"
        return Verdicts(scores, {UNSCORED_REASON: np.array(reasons, object)})
