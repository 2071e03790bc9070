"""The root verbs of instructions and the nouns they take, by rules for English that need no model of the language.

The root verb is that of the first sentence that asks: an imperative, or what "can you", "I want you to" and the like
ask for. A question has none; "can you help me?" counts only where nothing else asks. The noun is the head of the verb's
direct object. Of 100 recorded instructions that the rules were not made on, labelled by hand before they were applied,
they find the verb of 97 (Wilson 95 %: 92 to 99), verb and noun of 92 (85 to 96).

Source of the question: Dubois et al. 2023, AlpacaFarm (arXiv 2305.14387), figures 2, 14 and 15, after Wang et al. 2023,
Self-Instruct (arXiv 2212.10560), who use a parser.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from ...instructions import Instruction
from ..harness.page import Drawn
from ..harness.plots import COLORS, titled
from ..harness.study import Row

QUESTION: Final = "(a question)"
OTHER: Final = "(neither)"
"""In place of a verb: the first sentence that asks is a question; no sentence asks."""
NUM_VERBS: Final = 17
"""Verbs in a figure: as many as the sandbox has."""
NUM_NOUNS: Final = 3
PARTS: Final[dict[str, dict[str, Any]]] = {
    "its most frequent noun": {"color": COLORS[0]},
    "second": {"color": COLORS[5]},
    "third": {"color": COLORS[4]},
    "other nouns": {"color": "#cccccc"},
    "no noun": {"facecolor": "white", "edgecolor": "#888888", "hatch": "////", "linewidth": 0.5},
}
"""Parts of a bar: the `NUM_NOUNS` most frequent nouns, and the rest."""
NOTE: Final = "Colored, and beside the bar: the verb's most frequent nouns, of two instructions or more."

_WORDS: Final[dict[str, frozenset[str]]] = {
    kind: frozenset(words.split())
    for kind, words in yaml.safe_load(Path(__file__).with_name("roots.yaml").read_text("utf-8")).items()
}
_SPELLINGS: Final = {"analyse": "analyze", "summarise": "summarize"}
_ASK_A_VERB: Final = ("help", "let")
"""What follows them is a person and a verb, and no object: "help me write a letter"."""
_LEAD: Final = re.compile(
    r"""(?:please|kindly|hi|hello|hey|ok|okay|now|then|next|first|finally|also|so|and|but|just|go\ ahead\ and
    |(?:can|could|would|will)\ you|i(?:['’]d|\ would)\ (?:like|love)\ (?:for\ )?you\ to|i\ (?:want|need)\ you\ to
    |you(?:\ will)?\ (?:need|have)\ to|you\ (?:should|must|will|are\ to|are\ (?:required|expected|asked)\ to)
    |you\ will\ be\ (?:required|expected|asked)\ to|(?:your|the)\ (?:task|job|goal)\ is\ to|be\ sure\ to)\b[\s,!]*""",
    re.IGNORECASE | re.VERBOSE,
)
"""What stands before the verb of a request."""
_CLAUSE: Final = re.compile(
    r"""(?:based\ on|given|using|for|as|in|from|if|with|without|to|after|before|when|while|by|during|on|at|under|once
    |since|because|considering|according|instead)\b[^,]*,\s*""",
    re.IGNORECASE | re.VERBOSE,
)
"""A clause or phrase before the main one, up to its comma."""
_SENTENCE: Final = re.compile(r'(?<=[.?!;:])["”]?\s+|\n|<br>|["“]')
_TOKEN: Final = re.compile(r"[^\W\d_][\w'’+#/&-]*|\d[\w,.]*|[^\w\s]")
_BARE_HELP: Final = re.compile(r"help( me)?( out)?( with (this|that))?[.?!]*", re.IGNORECASE)


class Root(NamedTuple):
    """The root verb, or `QUESTION` or `OTHER`; and its noun in the singular, "" for none."""

    verb: str
    noun: str


def root(instruction: str) -> Root:
    """The root verb and its noun; of an instruction with an input, pass the instruction alone."""
    sentences = [part.strip() for part in _SENTENCE.split(instruction) if part.strip()]
    last = OTHER
    for sentence in sentences:
        if _BARE_HELP.fullmatch(_main_clause(sentence)):
            last = "help"
        elif (found := _request(sentence)) or _is_question(sentence):
            return found or Root(QUESTION, "")
    # "You are given a citation, convert it to ...": the request is a later clause.
    clauses = [clause for sentence in sentences for clause in re.split(r",\s+", sentence)[1:]]
    return next(filter(None, map(_request, clauses)), Root(last, ""))


def _main_clause(sentence: str) -> str:
    """The sentence without what stands before its main clause's verb."""
    before = None
    while before != sentence:
        before = sentence
        for start in (_LEAD, _CLAUSE):
            if found := start.match(sentence):
                sentence = sentence[found.end() :]
    return sentence


def _is_question(sentence: str) -> bool:
    words = _TOKEN.findall(_main_clause(sentence).lower())
    return sentence.endswith("?") or bool(words and words[0] in _WORDS["questions"])


def _request(sentence: str) -> Root | None:
    """The root of a sentence that asks by a verb; None for others."""
    words = _TOKEN.findall(_main_clause(sentence).lower())
    if not words or words[0] not in _WORDS["verbs"]:
        return None
    if words[0] == "do" and words[1:2] and words[1] in _WORDS["clauses"]:  # "do you ..."
        return None
    verb = _SPELLINGS.get(words[0], words[0])
    return Root(verb, "" if verb in _ASK_A_VERB else _noun(words[1:]))


def _noun(words: list[str]) -> str:
    """The head of the noun phrase that the words begin with, "" for none."""
    while words and words[0] in _WORDS["particles"]:
        words = words[1:]
    if words[1:2] == ["of"] and words[0] in _WORDS["quantifiers"]:
        words = words[2:]
    one = words[:1] in (["a"], ["an"])  # "a short, clear and friendly letter": adjectives, until the noun
    before_nouns = _WORDS["determiners"] | _WORDS["quantifiers"]
    ends = _WORDS["prepositions"] | _WORDS["clauses"] | {"and", "or"}
    phrase: list[str] = []
    for word, after in pairwise([*words, "."]):
        if word in (",", "and") and phrase and one and after.isalpha() and after not in before_nouns | _WORDS["verbs"]:
            continue
        # "a table containing the names", "the words given in the text"
        modifies = word.endswith(("ing", "ed", "given")) and after in before_nouns | _WORDS["prepositions"]
        if word in ends or not word[0].isalnum() or (modifies and phrase):
            break
        if word not in _WORDS["determiners"] and word[0].isalpha():
            phrase.append(word)
    nouns = [word for word in phrase if not word.endswith("ly")]
    return _singular(nouns[-1]) if nouns else ""


def _singular(noun: str) -> str:
    noun = re.sub(r"['’]s?$", "", noun)
    if noun in ("series", "species"):
        return noun
    if noun.endswith("ies") and noun not in ("movies", "cookies"):
        return noun[:-3] + "y"
    if noun.endswith(("ches", "shes", "xes", "sses")):
        return noun[:-2]
    return noun[:-1] if noun.endswith("s") and not noun.endswith(("ss", "us", "is")) else noun


def count(level: str, split: str, instructions: Iterable[Instruction]) -> list[Row]:
    """Rows of how many of a split's instructions have each verb and noun, most frequent first; n: all of the split."""
    found = Counter(root(each.instruction) for each in instructions)
    keys = {"level": level, "split": split}
    return [{**keys, **each._asdict(), "instructions": num, "n": found.total()} for each, num in found.most_common()]


def figures(rows: pd.DataFrame) -> dict[str, Drawn]:
    """File -> figure, for each level that `count` has rows of."""
    levels = rows.groupby("level", sort=False)
    return {
        f"roots_{level}": Drawn(draw(own, f"Level: {level}. {NOTE}"), f"Root verbs, {level}. {_told(own)}")
        for level, own in levels
    }


def _told(rows: pd.DataFrame) -> str:
    """What the bars say, for who cannot see them."""
    told = []
    for split, own in rows.groupby("split", sort=False):
        verbs = own.groupby("verb").instructions.sum()
        most = _asked(verbs).head(5)
        named = ", ".join(f"{verb} {num:,}" for verb, num in most.items())
        questions = f"{verbs.get(QUESTION, 0):,} are questions, {verbs.get(OTHER, 0):,} neither"
        told.append(f"Of the {verbs.sum():,} instructions of {split}, by verb: {named}; {questions}.")
    return " ".join(told)


def _asked(verbs: pd.Series[int]) -> pd.Series[int]:
    return verbs.drop([QUESTION, OTHER], errors="ignore").sort_values(ascending=False, kind="stable")


def draw(rows: pd.DataFrame, note: str) -> Drawing:
    """A panel for each split: its most frequent verbs as bars, cut into the nouns they take."""
    splits = rows.groupby("split", sort=False)
    figure = Drawing(figsize=(6.4, 0.6 + 4.6 * len(splits)), dpi=110, layout="constrained")
    axes = figure.subplots(len(splits), 1, squeeze=False)[:, 0]
    for axis, (split, own) in zip(axes, splits, strict=True):
        _draw_split(axis, str(split), own)
    axes[-1].legend(fontsize=8, frameon=False, loc="lower right")
    return titled(figure, "Root verbs of the instructions, and the nouns they take", note)


def _draw_split(axis: Axes, split: str, rows: pd.DataFrame) -> None:
    n, verbs = int(rows.n.iloc[0]), rows.groupby("verb").instructions.sum()
    asked = _asked(verbs)
    shown = asked.index[:NUM_VERBS]
    for place, verb in enumerate(shown):
        own = rows[rows.verb == verb].set_index("noun").instructions
        named = own.drop("", errors="ignore")
        most = named[named > 1].iloc[:NUM_NOUNS]
        widths = [*most, *[0] * (NUM_NOUNS - len(most)), named.iloc[len(most) :].sum(), own.get("", 0)]
        left = 0.0
        for width, (label, style) in zip(widths, PARTS.items(), strict=True):
            axis.barh(place, 100 * width / n, left=left, height=0.75, label=label if place == 0 else None, **style)
            left += 100 * width / n
        text = ", ".join(f"{noun} {num}" for noun, num in most.items())
        axis.text(left, place, f"  {text}", fontsize=8, va="center")
    axis.set_yticks(range(len(shown)), shown, fontsize=9)
    axis.set(xlabel="share of the instructions (%)", ylim=(len(shown) - 0.4, -0.6), xlim=(0, 210 * asked.iloc[0] / n))
    axis.set_title(f"{split}: {asked.sum():,} of n = {n:,} ask by {len(asked)} verbs", fontsize=10, loc="left")
