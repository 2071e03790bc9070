"""Reads an annotator's reply: one verdict for each pair, or one rating for each response, that it was shown.

The whole reply has to be the answer that the prompt asked for. A judge may quote the responses, which may contain
anything, even a verdict: so nothing is searched for inside a text, and a reply with anything else in it is refused, and
asked for again.

* "lines": one line a pair, `Output (a)` or `Output (b)`, numbered from 1 (`1. Output (a)`,
  `Pair 1: Output (a)`) or not at all.
* "label": `Output (a)` or `Output (b)`.
* "json": an array with one object a pair, {"explanation": "...", "a_better": true or false}. The objects may also
  follow one another without an array, and all of it may be in a fence of three backticks.
* "logprobs": the reply's first token is "a" or "b"; its probabilities are the verdict. One pair only.
* "rating": as "json", one object a response, {"critique": "...", "rating": 1 to 7}.

Blanks around a label, a full stop after it and upper or lower case do not matter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from ..errors import UnparsableVerdictError
from ..instructions import RATINGS
from ..oracles.base import shorten

if TYPE_CHECKING:
    from ..llm.replies import Reply

# ASCII: no look-alike letters. `\Z`: `$` would let a newline follow.
_LABEL: Final = r"output \(([ab])\)\.?"
_ONE: Final = re.compile(rf"\s*{_LABEL}\s*\Z", re.ASCII | re.IGNORECASE)
_LINE: Final = re.compile(
    rf"[ \t]*(?:(?:pair )?([1-9][0-9]{{0,5}})[.:)][ \t]*)?{_LABEL}[ \t\r]*\Z", re.ASCII | re.IGNORECASE
)
_FENCE: Final = re.compile(r"\s*```(?:json)?[ \t\r]*\n(.*)\n[ \t]*```\s*\Z", re.ASCII | re.IGNORECASE | re.DOTALL)
_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_VERDICT: Final = '{"explanation": "...", "a_better": true or false}'
_RATING: Final = f'{{"critique": "...", "rating": a whole number from {RATINGS[0]} to {RATINGS[-1]}}}'
_LEAST_MASS: Final = 0.5
"""Least probability of "a" and "b" together for the first token to count as an answer."""


class Opinion(NamedTuple):
    """What an annotator thinks of one pair or response."""

    score: float
    """P(the response shown second is better): 0 for (a), 1 for (b), for "logprobs" any from 0 to 1. Or a rating."""
    words: str = ""
    """Its explanation or critique, where the format has one."""


def parse(format: str, reply: Reply, size: int) -> list[Opinion]:
    """What the reply says of each pair or response, in order.

    Args:
        format: "lines", "label", "json", "logprobs" or "rating".
        reply: The model's reply.
        size: How many pairs or responses the request held.

    Raises:
        UnparsableVerdictError: The reply is not `size` verdicts in this format.
    """
    opinions = _READERS[format](reply)
    if len(opinions) != size:
        _refuse(f"{size} verdicts, one for each pair or response shown, in order", f"{len(opinions)}", reply.text)
    return opinions


def _lines(reply: Reply) -> list[Opinion]:
    _check_ended(reply)
    lines = [line for line in reply.text.split("\n") if line.strip()]
    matches = [_LINE.match(line) for line in lines]
    for line, match in zip(lines, matches, strict=True):
        if not match:
            _refuse('nothing but lines "Output (a)" or "Output (b)"', f"the line {shorten(line)}", reply.text)
    numbers = [match[1] for match in matches if match]
    if any(numbers) and numbers != [str(n) for n in range(1, len(numbers) + 1)]:
        found = ", ".join(number or "none" for number in numbers[:20])
        _refuse("verdicts numbered from 1 in order, or not at all", f"the numbers {found}", reply.text)
    return [_second(match[2]) for match in matches if match]


def _label(reply: Reply) -> list[Opinion]:
    _check_ended(reply)
    match = _ONE.match(reply.text)
    if not match:
        _refuse('"Output (a)" or "Output (b)" and nothing else', "another text", reply.text)
    return [_second(match[1])]


def _json(reply: Reply) -> list[Opinion]:
    objects = _objects(reply, _VERDICT, "explanation", "a_better", lambda value: isinstance(value, bool))
    return [Opinion(0.0 if value["a_better"] else 1.0, value["explanation"]) for value in objects]


def _ratings(reply: Reply) -> list[Opinion]:
    objects = _objects(reply, _RATING, "critique", "rating", lambda value: type(value) is int and value in RATINGS)
    return [Opinion(float(value["rating"]), value["critique"]) for value in objects]


def _objects(
    reply: Reply, asked: str, words: str, verdict: str, fits: Callable[[object], bool]
) -> list[dict[str, Any]]:
    """The objects of a reply: each has two fields, a text and a verdict."""
    fenced = _FENCE.match(reply.text)
    values = _values(fenced[1] if fenced else reply.text, asked, reply.text)
    objects: list[Any] = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    for position, value in enumerate(objects, 1):
        whole = isinstance(value, dict) and value.keys() == {words, verdict}
        if not (whole and isinstance(value[words], str) and fits(value[verdict])):
            _refuse(f"verdict {position} to be {asked}", shorten(repr(value), 120), reply.text)
    return objects


def _values(text: str, asked: str, whole: str) -> list[Any]:
    """The JSON values that make up the text, separated by blanks only."""
    # strict=False: models write line breaks inside strings, which are unambiguous.
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_object, parse_constant=_no_constant)
    values, end = [], _skip_blanks(text, 0)
    while end < len(text):
        try:
            value, end = decoder.raw_decode(text, end)
        except (ValueError, RecursionError) as error:  # not JSON, an endless number, a thousand brackets
            _refuse(f"JSON objects {asked}", f"{type(error).__name__}: {shorten(str(error), 120)}", whole)
        values.append(value)
        end = _skip_blanks(text, end)
    return values


def _skip_blanks(text: str, start: int) -> int:
    match = _BLANKS.match(text, start)
    return match.end() if match else start


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object with the same key twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _logprobs(reply: Reply) -> list[Opinion]:
    if not reply.logprobs or not reply.logprobs[0]:
        _refuse(
            "log-probabilities of the first token (does the server give any? If not, use a pool without them)",
            "none",
            reply.text,
        )
    first: Mapping[str, float] = reply.logprobs[0]
    if not all(logprob <= 1e-3 for logprob in first.values()):  # also false for NaN; servers round 0 up a little
        _refuse("log-probabilities of 0 or less", shorten(str(dict(first)), 120), reply.text)
    mass = {letter: sum(math.exp(p) for token, p in first.items() if _letter(token) == letter) for letter in "ab"}
    total = mass["a"] + mass["b"]
    if not _LEAST_MASS <= total <= 1.05:
        asked = f'a first token "a" or "b", with a probability of {_LEAST_MASS} to 1 for both together'
        _refuse(asked, f"{total:.3g} (first tokens {shorten(str(list(first)), 120)})", reply.text)
    return [Opinion(mass["b"] / total)]


def _letter(token: str) -> str:
    return token.strip(" \t\r\n").lower()


def _second(letter: str) -> Opinion:
    return Opinion(1.0 if letter in "bB" else 0.0)


def _check_ended(reply: Reply) -> None:
    # "Output (a)" may be the start of "Output (a) is worse".
    if reply.finish_reason == "length":
        _refuse("a whole reply", "one cut at its token limit (max_tokens in the pool's file)", reply.text)


def _refuse(expected: str, got: str, text: str) -> NoReturn:
    raise UnparsableVerdictError(f"Expected {expected}; got {got}. The reply: {shorten(text, 200)}")


_READERS: Final[dict[str, Callable[[Reply], list[Opinion]]]] = {
    "lines": _lines,
    "label": _label,
    "json": _json,
    "logprobs": _logprobs,
    "rating": _ratings,
}
