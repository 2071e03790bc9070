"""What the sandbox's annotator answers to a prompt: reads the request back and asks the annotator.

Verdicts and ratings are those of the sandbox's own pools in process, seed for seed: `sandbox.judges.Annotators`,
`sandbox.raters.Raters` and this module share the annotators, their log-odds or likings and the draws.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from ..annotators.config import AnnotatorConfig, PoolConfig, load_pool, load_prompt
from ..annotators.prompts import Item, Shown, Single, read
from ..annotators.strict_yaml import check
from ..data.schema import shown
from ..errors import PoolError
from ..oracles.draws import KeyedDraws, probability
from ..sandbox import tasks
from ..sandbox.judges import FEATURES, GREEDY, POOL, Annotator, features, log_odds
from ..sandbox.raters import Raters
from .replies import JudgeAnswer, JudgeQuestion, Rated, Verdict, count_tokens

POOLS: Final = ("alpaca_farm", "greedy", "weighted", "raters")
"""The pools whose prompts are always recognized."""
BY_TASTE: Final = "by length, lists, courtesy and position alone"
"""How the sandbox's annotators judge what they do not understand."""
_FALLBACK: Final = GREEDY[0]
"""Answers for annotators that the sandbox has none of that name for."""
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


_Tokens = Annotated[int, Field(ge=1)]
_Count = Annotated[int, Field(ge=0, le=20)]


class _Body(BaseModel):
    """Settings that change the answer; a value that the judge server could not honour is refused, others ignored."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    model: Annotated[str, Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    seed: int | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    stream: Literal[False] | None = None
    n: Literal[1] = 1


class _Message(BaseModel):
    role: str
    content: str


class _Chat(_Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: _Count | None = None


class _Completion(_Body):
    prompt: str
    logprobs: _Count | None = None


class SandboxJudge:
    """The sandbox's annotators as served models.

    Args:
        seed: Seeds the verdicts of requests without a seed.
        pools: Further pools, names or files, whose prompts are recognized; their annotators judge as the sandbox's of
            that name, others as its greedy one.
        anyway: Judge instructions of another world too, see `answer`; else they are refused.
    """

    def __init__(self, seed: int = 0, pools: Iterable[str | Path] = (), *, anyway: bool = False) -> None:
        self.seed = seed
        self.anyway = anyway
        # The scale is read from 2,000 responses once; of the first requests, which come together, by one.
        self._rating = threading.Lock()
        members, self._streams = _members((*_bundled(), *map(load_pool, pools)))
        prompts = {file: load_prompt(file) for file in members}
        self._prompts = {prompt.name: prompt for prompt in prompts.values()}
        self._members = {prompts[file].name: asked for file, asked in members.items()}
        known = {annotator.name: annotator for annotator in (*POOL, *GREEDY)}
        self._annotators = {name: known.get(name, _FALLBACK) for name in self._streams}

    def annotator(self, prompt: str, model: str) -> str:
        """Who answers a prompt; of several, the one whose role is in the model's name."""
        members = self._members[prompt]
        return next((member.name for member in members if member.role in model.lower()), members[0].name)

    def read(self, kind: str, content: Mapping[str, Any]) -> JudgeQuestion:
        """What a request's body asks.

        Raises:
            PoolError: It cannot be answered, or its instructions are not the sandbox's; the message says why.
            InvalidResponseError: A text that cannot be written as UTF-8.
        """
        body: _Chat | _Completion
        prompt: Any
        if kind == "chat":
            body = check(_Chat, content, "The request")
            prompt, top_logprobs = content["messages"], (body.top_logprobs or 0) if body.logprobs else None
            text = "".join(message.content for message in body.messages)
        else:
            body = check(_Completion, content, "The request")
            prompt, top_logprobs, text = body.prompt, body.logprobs, body.prompt
        name, items = read(prompt, self._prompts.values())
        if not self.anyway:
            _refuse_foreign(items)
        return JudgeQuestion(
            annotator=self.annotator(name, body.model),
            items=items,
            kind=kind,
            model=body.model,
            format=self._prompts[name].format,
            prompt_tokens=count_tokens(text),
            seed=body.seed,
            temperature=body.temperature,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            top_logprobs=top_logprobs,
        )

    def answer(self, question: JudgeQuestion, key: str) -> JudgeAnswer:
        """The annotator's answer to a question from `read`; `key`, a digest of the body, names it.

        Temperature 0 gives the likelier verdict, the first response's where both are alike. Above it a verdict is a
        draw from the annotator's own probability, whose log-odds are divided by the temperature. The draw is keyed on
        the seed, the annotator's pool, the instruction and the unordered pair: the same pair, among whatever other
        pairs, gets the same verdict, and another seed is another opinion.

        A rating is that of `Raters.rate`, at the request's temperature.

        An instruction of another world than the sandbox's is judged by the annotator's tastes alone: length, lists,
        courtesy and position.
        """
        pairs = [item for item in question.items if isinstance(item, Item)]
        singles = [item for item in question.items if isinstance(item, Single)]
        said = self._rated(question, singles) if singles else self._compared(question, pairs)
        return JudgeAnswer(question, tuple(said), f"judge-{key[:24]}")

    def _compared(self, question: JudgeQuestion, pairs: Sequence[Item]) -> Iterable[Verdict]:
        annotator = self._annotators[question.annotator]
        instructions, first, second_shown = ([pair[place] for pair in pairs] for place in range(3))
        gaps = _features(instructions, second_shown) - _features(instructions, first)
        odds = log_odds(gaps, annotator.weights(), annotator.position, annotator.temperature)
        if question.temperature == 0:
            second = odds > 0
        else:
            draws = KeyedDraws(self._seed(question), self._streams[question.annotator])
            with np.errstate(over="ignore"):  # near 0 any leaning is a certainty
                second = draws.b_wins(pairs, odds / question.temperature)
        return map(Verdict, probability(odds).tolist(), second.tolist(), _reasons(annotator, gaps, second))

    def _rated(self, question: JudgeQuestion, singles: Sequence[Single]) -> Iterable[Rated]:
        annotator, stream = self._annotators[question.annotator], self._streams[question.annotator]
        raters, who = Raters(stream, [annotator], seed=self._seed(question)), np.zeros(len(singles), np.int64)
        found = _features([item.instruction for item in singles], [item.output for item in singles])
        with self._rating:
            ratings = raters.rate(singles, who, temperature=question.temperature, found=found)
        return map(Rated, ratings.astype(int).tolist(), raters.critiques(singles, who))

    def _seed(self, question: JudgeQuestion) -> int:
        return self.seed if question.seed is None else question.seed


def _refuse_foreign(items: Sequence[Shown]) -> None:
    if foreign := [item.instruction for item in items if not tasks.known(item.instruction)]:
        raise PoolError(
            f"Expected instructions of the sandbox, but {len(foreign)} of {len(items)} in this request are not, for "
            f"instance {shown(foreign[0])}. The judge server's annotators know the sandbox's world only: ask a real "
            f"model about other texts, or start judge-server with --anyway to have them judged {BY_TASTE}."
        )


@cache
def _bundled() -> tuple[PoolConfig, ...]:
    """`POOLS`, read once, as it takes 0.1 s; the users' own pools may change between two servers."""
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


def _features(instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
    """[B, features]; for an instruction of another world those that can be seen without understanding, else 0."""
    found = features(instructions, responses)
    for row in np.flatnonzero(np.isnan(found).any(axis=1)).tolist():
        found[row] = _surface(responses[row])
    return found


def _surface(response: str) -> NDArray[np.float64]:
    """The features that can be seen without understanding."""
    found: NDArray[np.float64] = features([_ANY_TASK], [response])[0]
    found[: FEATURES.index("length")] = 0.0
    return found


_ANY_TASK: Final = "List two traits of a lion."
"""Some instruction of the sandbox: length, lists and courtesy do not depend on it."""


def _reasons(annotator: Annotator, gaps: NDArray[np.float64], second: NDArray[np.bool_]) -> list[str]:
    """What spoke most for the chosen response, in a sentence per item."""
    gains = np.where(second[:, None], 1.0, -1.0) * gaps * annotator.weights()
    best = gains.argmax(axis=1)
    names = [FEATURES[feature] if gains[row, feature] > 0 else "" for row, feature in enumerate(best)]
    sides = np.where(second, "second", "first")
    return [f"The {side} response {_REASONS[name]}." for side, name in zip(sides, names, strict=True)]
