"""What the sandbox's annotator answers to a prompt: reads the request back, asks the annotator, writes its reply.

Verdicts are those of the sandbox's own pools in process, seed for seed: `sandbox.judges.Annotators` and this module
share the annotators, their log-odds and the draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..annotators.config import AnnotatorConfig, PoolConfig, load_pool, load_prompt
from ..annotators.prompts import Item, read
from ..data.schema import shown
from ..errors import PoolError
from ..oracles.draws import KeyedDraws, probability
from ..sandbox import tasks
from ..sandbox.judges import FEATURES, GREEDY, POOL, Annotator, features, log_odds
from .completions import JudgeAnswer, Verdict, count_tokens

POOLS: Final = ("alpaca_farm", "greedy", "weighted")
"""The pools whose prompts are always understood."""
BY_TASTE: Final = "by length, lists, courtesy and position alone"
"""How the sandbox's annotators judge what they do not understand."""
_FALLBACK: Final = GREEDY[0]
"""Stands behind annotators that the sandbox has none of that name for."""
_REASONS: Final = {
    "complete": "covers more of what was asked for",
    "false": "makes fewer false claims",
    "repeated": "repeats itself less",
    "form": "keeps closer to the form asked for",
    "fluent": "reads better",
    "excess": "wastes fewer words",
    "length": "is of a better length",
    "list": "is laid out better",
    "courtesy": "has the better tone",
    "": "is the better one on the whole",
}


@dataclass(frozen=True)
class JudgeQuestion:
    """A request, read.

    Attributes:
        annotator: The name of who is asked.
        seed: The seed that came with the request; None if none did.
        items: The pairs, in the order they are shown.
        temperature: From 0 to 2; 1 if the body names none.
        kind: "chat" or "completion".
        model: The model's name in the request.
        format: The prompt's format.
        prompt_tokens: Tokens of the prompt.
        max_tokens: The most tokens to answer; None for no limit.
        top_logprobs: How many logprobs a token is to have; None for none at all.
    """

    annotator: str
    seed: int | None
    items: Sequence[Item]
    temperature: float
    kind: str
    model: str
    format: str
    prompt_tokens: int
    max_tokens: int | None
    top_logprobs: int | None


class SandboxJudge:
    """The sandbox's annotators as served models.

    Args:
        seed: Seeds the verdicts of requests that bring no seed.
        pools: Further pools, names or files, whose prompts are read; their annotators judge as the sandbox's of that
            name, others as its greedy one.
        anyway: Judge instructions of another world than the sandbox's too, see `answer`; else they are refused.
    """

    def __init__(self, seed: int = 0, pools: Iterable[str | Path] = (), *, anyway: bool = False) -> None:
        self.seed = seed
        self.anyway = anyway
        members, self._streams = _members((*_bundled(), *map(load_pool, pools)))
        prompts = {file: load_prompt(file) for file in members}
        self._prompts = {prompt.name: prompt for prompt in prompts.values()}
        self._members = {prompts[file].name: asked for file, asked in members.items()}
        known = {annotator.name: annotator for annotator in (*POOL, *GREEDY)}
        self._annotators = {name: known.get(name, _FALLBACK) for name in self._streams}

    def annotator(self, prompt: str, model: str) -> str:
        """Who answers a prompt: a prompt that two share is told apart by the role in the model's name."""
        members = self._members[prompt]
        return next((member.name for member in members if member.role in model.lower()), members[0].name)

    def read(self, kind: str, body: Mapping[str, Any]) -> JudgeQuestion:
        """What a request asks.

        Args:
            kind: "chat" or "completion".
            body: The request's body.

        Raises:
            PoolError: The body is not a request that can be answered, or its instructions are not the sandbox's; the
                message says why.
            InvalidResponseError: A text that cannot be written as UTF-8.
        """
        _check_settings(body)
        prompt = _prompt(kind, body.get("messages" if kind == "chat" else "prompt"))
        name, items = read(prompt, self._prompts.values())
        if not self.anyway:
            _refuse_foreign(items)
        model = str(body["model"])
        texts = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        return JudgeQuestion(
            annotator=self.annotator(name, model),
            seed=body.get("seed"),
            items=items,
            temperature=body.get("temperature", 1.0),
            kind=kind,
            model=model,
            format=self._prompts[name].format,
            prompt_tokens=count_tokens(texts),
            max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
            top_logprobs=_top_logprobs(kind, body),
        )

    def answer(self, question: JudgeQuestion, key: str) -> JudgeAnswer:
        """The annotator's answer.

        Temperature 0 gives the likelier verdict, the first response's where both are alike. Above it a verdict is a
        draw from the annotator's own probability, whose log-odds are divided by the temperature. The draw is keyed on
        the seed, the annotator's pool, the instruction and the unordered pair: the same request, or the same pair
        among other pairs, gets the same verdict, and another seed is another opinion.

        An instruction of another world than the sandbox's is judged by the annotator's tastes alone: length, lists,
        courtesy and position.

        Args:
            question: From `read`.
            key: A digest of the body, which names the answer.
        """
        annotator = self._annotators[question.annotator]
        gaps = _gaps(question.items)
        odds = _log_odds(annotator, gaps)
        if question.temperature == 0:
            second = odds > 0
        else:
            seed = self.seed if question.seed is None else question.seed
            draws = KeyedDraws(seed, self._streams[question.annotator])
            with np.errstate(over="ignore"):  # near 0 any leaning is a certainty
                second = draws.b_wins(question.items, odds / question.temperature)
        reasons = _reasons(annotator, gaps, second)
        return JudgeAnswer(
            kind=question.kind,
            model=question.model,
            format=question.format,
            verdicts=tuple(map(Verdict, probability(odds).tolist(), second.tolist(), reasons)),
            prompt_tokens=question.prompt_tokens,
            max_tokens=question.max_tokens,
            top_logprobs=question.top_logprobs,
            name=f"judge-{key[:24]}",
        )


def _refuse_foreign(items: Sequence[Item]) -> None:
    if foreign := [item.instruction for item in items if not tasks.known(item.instruction)]:
        raise PoolError(
            f"Expected instructions of the sandbox, but {len(foreign)} of {len(items)} in this request are not, for "
            f"instance {shown(foreign[0])}. The judge server's annotators know the sandbox's world only: ask a real "
            f"model about other texts, or start judge-server with --anyway to have them judged {BY_TASTE}."
        )


@cache
def _bundled() -> tuple[PoolConfig, ...]:
    """`POOLS`, read once, which takes a tenth of a second; a pool of one's own may change between two servers."""
    return tuple(map(load_pool, POOLS))


def _members(pools: Iterable[PoolConfig]) -> tuple[dict[str, list[AnnotatorConfig]], dict[str, str]]:
    """Prompt -> the annotators that are asked by it, and annotator -> its pool's draws."""
    members: dict[str, list[AnnotatorConfig]] = {}
    streams: dict[str, str] = {}
    for pool in pools:
        for member in pool.annotators:
            members.setdefault(member.prompt, []).append(member)
            streams.setdefault(member.name, pool.stream)
    return members, streams


def _gaps(items: Sequence[Item]) -> NDArray[np.float64]:
    """How much more of each feature the second response has, [B, features]."""
    instructions = [item.instruction for item in items]
    first, second = (features(instructions, [item[side] for item in items]) for side in (1, 2))
    gaps: NDArray[np.float64] = second - first
    for row in np.flatnonzero(np.isnan(gaps).any(axis=1)).tolist():
        gaps[row] = _surface(items[row].second) - _surface(items[row].first)
    return gaps


def _surface(response: str) -> NDArray[np.float64]:
    """The features that can be seen without understanding: the sandbox's own of a task that nothing can be said of."""
    found: NDArray[np.float64] = features([_ANY_TASK], [response])[0]
    found[: FEATURES.index("length")] = 0.0
    return found


_ANY_TASK: Final = "List two traits of a lion."
"""Some instruction of the sandbox: length, lists and courtesy do not depend on it."""


def _log_odds(annotator: Annotator, gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    return log_odds(gaps, annotator.weights(), annotator.position, annotator.temperature)


def _reasons(annotator: Annotator, gaps: NDArray[np.float64], second: NDArray[np.bool_]) -> list[str]:
    """What spoke most for the response that was chosen, in a sentence an item."""
    gains = np.where(second[:, None], 1.0, -1.0) * gaps * annotator.weights()
    best = gains.argmax(axis=1)
    names = [FEATURES[feature] if gains[row, feature] > 0 else "" for row, feature in enumerate(best)]
    sides = np.where(second, "second", "first")
    return [f"The {side} response {_REASONS[name]}." for side, name in zip(sides, names, strict=True)]


def _prompt(kind: str, prompt: object) -> str | list[dict[str, Any]]:
    """The prompt, checked for its shape only."""
    if kind == "completion":
        if isinstance(prompt, str):
            return prompt
        raise PoolError("prompt: expected one text; batches of prompts and token ids are not understood.")
    if isinstance(prompt, list) and prompt:
        fields = [(m.get("role"), m.get("content")) if isinstance(m, dict) else (None, None) for m in prompt]
        if all(isinstance(role, str) and isinstance(content, str) for role, content in fields):
            return prompt
    raise PoolError("messages: expected a list of {role, content}, both of them texts.")


def _check_settings(body: Mapping[str, Any]) -> None:
    """Refuses what would be answered differently from what was asked."""
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise PoolError(f"model: expected a model's name, got {body.get('model')!r}.")
    temperature = body.get("temperature", 1.0)
    if not _is_number(temperature) or not 0 <= temperature <= 2:
        raise PoolError(f"temperature: expected a number from 0 to 2, got {temperature!r}.")
    seed = body.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise PoolError(f"seed: expected a whole number or null, got {seed!r}.")
    for name in ("max_tokens", "max_completion_tokens"):
        limit = body.get(name, 1)
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise PoolError(f"{name}: expected a positive whole number, got {limit!r}.")
    if body.get("stream"):
        raise PoolError("stream: the judge server answers in one piece; leave it out.")
    if body.get("n", 1) != 1:
        raise PoolError(f"n: the judge server gives one answer a request, got {body['n']!r}; ask again for another.")


def _top_logprobs(kind: str, body: Mapping[str, Any]) -> int | None:
    """How many logprobs are asked for: "logprobs" is a number for completions, and a yes or no for chats."""
    asked = body.get("logprobs")
    if asked is None or asked is False:
        return None
    count = body.get("top_logprobs", 0) if kind == "chat" else asked
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 20:
        raise PoolError(f"{'top_logprobs' if kind == 'chat' else 'logprobs'}: expected 0 to 20, got {count!r}.")
    return count


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
