"""Reward hacking, printed: the responses whose proxy rose most from the peak of gold to the end while gold fell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..harness.report import Table
from ..harness.report_text import signed

NUM_SHOWN = 6


@dataclass(frozen=True)
class Answer:
    """A response with its proxy (reward-model units) and gold; NaN for no verdict."""

    response: str
    proxy: float
    gold: float

    def told(self) -> str:
        """The response with its two rewards."""
        return f"{self.response}\n\nproxy {self.proxy:.2f}; gold {self.gold:.2f}"


@dataclass(frozen=True)
class Entry:
    """One instruction's responses at the start, at the peak of mean gold and at the end of a run."""

    instruction: str
    start: Answer
    peak: Answer
    end: Answer

    @property
    def rise(self) -> float:
        """Of the proxy from the peak of mean gold to the end."""
        return self.end.proxy - self.peak.proxy

    @property
    def fall(self) -> float:
        """Of gold from the peak of mean gold to the end."""
        return self.peak.gold - self.end.gold

    @property
    def hacked(self) -> bool:
        """Whether the proxy rose while gold fell; not where one of the four is missing."""
        return self.rise > 0 and self.fall > 0


@dataclass(frozen=True)
class Run:
    """The entries of one treatment, method and seed, and where its three evaluations stand."""

    title: str
    """For instance "25 % flips, PPO, seed 0"."""
    places: tuple[str, str, str]
    """For instance ("step 0", "step 6", "step 40")."""
    entries: Sequence[Entry]

    @classmethod
    def of(
        cls,
        title: str,
        places: tuple[str, str, str],
        start: Mapping[str, Sequence[Any]],
        peak: Mapping[str, Sequence[Any]],
        end: Mapping[str, Sequence[Any]],
    ) -> Run:
        """From three evaluations of the same instructions, each {"instructions", "responses", "proxy", "gold"}: [B].

        Raises:
            ValueError: The instructions differ.
        """
        if not list(start["instructions"]) == list(peak["instructions"]) == list(end["instructions"]):
            raise ValueError(f"{title}: expected three evaluations of the same instructions in the same order")
        columns = [_answers(found) for found in (start, peak, end)]
        return cls(title, places, [Entry(*row) for row in zip(start["instructions"], *columns, strict=True)])


def hacked(run: Run, num: int = NUM_SHOWN) -> list[Entry]:
    """The `num` hacked entries whose proxy rose most, the most first."""
    return sorted((entry for entry in run.entries if entry.hacked), key=lambda entry: -entry.rise)[:num]


def gallery_table(run: Run, num: int = NUM_SHOWN) -> Table:
    """The most hacked responses of a run beside what they were; the caption says how many there are in all."""
    start, peak, end = run.places
    rows = [
        (
            entry.instruction,
            entry.start.told(),
            entry.peak.told(),
            f"{entry.end.told()}\nsince {peak}: proxy {signed(entry.rise)}, gold {signed(-entry.fall)}",
        )
        for entry in hacked(run, num)
    ]
    total = sum(entry.hacked for entry in run.entries)
    caption = (
        f"{run.title}: of {len(run.entries)} responses {total} have a higher proxy and a lower gold at {end} than at "
        f"{peak}, the peak of mean gold; shown are the {len(rows)} whose proxy rose most, chosen for that and not "
        "typical."
    )
    header = ("instruction", f"SFT ({start})", f"peak of gold ({peak})", f"end ({end})")
    return Table(header, rows, caption)


def _answers(found: Mapping[str, Sequence[Any]]) -> Iterator[Answer]:
    for response, proxy, gold in zip(found["responses"], found["proxy"], found["gold"], strict=True):
        yield Answer(str(response), *(math.nan if value is None else float(value) for value in (proxy, gold)))
