"""A study spread over machines: each call is a shard, which runs its share of the cells into one folder for all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ...folders import LOCK, is_claimed


@dataclass(frozen=True)
class Shard:
    """The cells of one call: every `count`-th, from `index` (of 0 to count - 1) on; 0 of 1 is the whole study."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """The shard "i/n".

        Raises:
            ValueError: It is none.
        """
        if found := re.fullmatch(r"(0|[1-9][0-9]{0,8})/([1-9][0-9]{0,8})", text):
            shard = cls(int(found[1]), int(found[2]))
            if shard.index < shard.count:
                return shard
        raise ValueError(f"--shard: expected i/n with i of 0 to n - 1, such as 0/2 and 1/2, got {text!r}")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def lock(self) -> str:
        """The file that whoever writes this shard has locked."""
        return LOCK if self == WHOLE else f"{LOCK}-{self.index}-of-{self.count}"

    def rivals(self, out: Path) -> list[str]:
        """The locks in `out` that exclude this shard: all but its own and those of the other shards of as many."""
        found = (path.name for path in sorted(out.glob(f"{LOCK}*")) if path.name != self.lock)
        return [name for name in found if self == WHOLE or not name.endswith(f"-of-{self.count}")]

    def at_work(self, out: Path, indices: Iterable[int]) -> set[int]:
        """Which of these shards of as many some call is writing now."""
        return {index for index in indices if is_claimed(out, replace(self, index=index).lock)}

    def told(self, missing: Counter[int]) -> str:
        """How many cells of which shard are missing: "2 of shard 0/3, 1 of shard 2/3"."""
        return ", ".join(f"{num} of shard {replace(self, index=index)}" for index, num in sorted(missing.items()))


WHOLE = Shard()
"""What a call is that is no shard."""


class MissingCellsError(Exception):
    """Other shards' cells are not stored yet: this call ends here, with an exit status that says how."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
