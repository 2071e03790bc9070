"""The rows of the over-optimization study as curves: one a reward treatment and method, all seeds on common points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..harness.study import Row, number_of

COLUMNS = (
    "treatment",
    "method",
    "seed",
    "step",
    "n",
    "kl_exact",
    "proxy",
    "gold",
    "win_rate_simulated",
    "win_rate_human",
    "length",
    "disagreement",
)
"""Columns of table.csv: one row an evaluation of a treatment, method and seed."""
MEASURES = COLUMNS[5:]
REQUIRED = ("kl_exact", "proxy", "gold")
"""Measures without which a curve says nothing: NaN is refused."""
METHODS = ("ppo", "best_of_n")
METHOD_WORDS = {"ppo": "PPO", "best_of_n": "best-of-n"}
POSITION = {"ppo": "step", "best_of_n": "n"}
"""Method -> the column that says how far optimization has gone."""

Array = NDArray[np.float64]
Key = tuple[str, str]


@dataclass(frozen=True)
class Curves:
    """One treatment and method. `values`: measure -> [S, K], S seeds, K evaluations; the first is the SFT policy.

    kl_exact in nats a response, proxy in reward-model units, gold in gold units, win rates in percent, length in
    characters, disagreement (std over an ensemble's members) in reward-model units; NaN where a measure does not exist.
    """

    treatment: str
    method: str
    seeds: tuple[int, ...]
    positions: tuple[int, ...]
    """[K] PPO steps from 0, or n from 1."""
    values: Mapping[str, Array]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Curves:
        """Arrays from the rows of one treatment and method, in any order.

        Raises:
            ValueError: No rows, rows of several treatments or methods, a seed without a position that another has, a
                row twice, no start (step 0 or n = 1), or a kl_exact, proxy or gold that is not a finite number.
        """
        kinds = {(str(row["treatment"]), str(row["method"])) for row in rows}
        if len(kinds) != 1 or (kind := next(iter(kinds)))[1] not in METHODS:
            raise ValueError(f"expected rows of one treatment and a method of {METHODS}, got {sorted(kinds)}")
        column = POSITION[kind[1]]
        found = {(int(row["seed"]), int(row[column])): row for row in rows}
        seeds, positions = (tuple(sorted({key[side] for key in found})) for side in (0, 1))
        lacking = [(seed, place) for seed in seeds for place in positions if (seed, place) not in found]
        start = 0 if kind[1] == "ppo" else 1
        if lacking or len(found) != len(rows) or positions[0] != start:
            raise ValueError(
                f"{kind}: expected one row for every seed {seeds} and {column} {positions}, {column} {start} among "
                f"them; got {len(rows)} rows, without (seed, {column}) {lacking}"
            )
        values = {
            name: np.array([[number_of(found[seed, place][name]) for place in positions] for seed in seeds])
            for name in MEASURES
        }
        for name in REQUIRED:
            for seed, place in zip(*np.nonzero(~np.isfinite(values[name])), strict=True):
                raise ValueError(
                    f"{kind}, seed {seeds[seed]}, {column} {positions[place]}: expected a finite {name}, "
                    f"got {values[name][seed, place]}"
                )
        return cls(*kind, seeds, positions, values)

    def __getitem__(self, measure: str) -> Array:
        return self.values[measure]

    def has(self, measure: str) -> bool:
        """Whether every seed has the measure at every evaluation."""
        return bool(np.isfinite(self.values[measure]).all())

    @property
    def root_kl(self) -> Array:
        """[S, K] d = sqrt(KL) in sqrt(nats); an estimate of KL that comes out a little below 0 counts as 0."""
        roots: Array = np.sqrt(np.maximum(self.values["kl_exact"], 0))
        return roots

    @property
    def disagrees(self) -> bool:
        """Whether the reward is an ensemble's, whose members can disagree."""
        return self.has("disagreement") and bool(self.values["disagreement"].any())

    @property
    def along(self) -> tuple[str, Array]:
        """The axis along optimization: its label, and [K] PPO steps or log2 n."""
        places = np.array(self.positions, dtype=np.float64)
        return ("PPO step", places) if self.method == "ppo" else ("log₂ n", np.log2(places))

    def place(self, index: int) -> str:
        """For instance "step 10" or "n = 16"."""
        return f"step {self.positions[index]}" if self.method == "ppo" else f"n = {self.positions[index]}"

    def only(self, seeds: Sequence[int]) -> Curves:
        """The same of some seeds."""
        places = [self.seeds.index(seed) for seed in seeds]
        values = {name: table[places] for name, table in self.values.items()}
        return Curves(self.treatment, self.method, tuple(seeds), self.positions, values)


def all_curves(rows: Sequence[Row]) -> dict[Key, Curves]:
    """(treatment, method) -> its curves, in the order in which they first come.

    Raises:
        ValueError: There are no rows, or they are faulty: see `Curves.of`.
    """
    if not rows:
        raise ValueError("expected at least one row of the over-optimization study, got none")
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault((str(row["treatment"]), str(row["method"])), []).append(row)
    return {key: Curves.of(group) for key, group in groups.items()}


def paired(*curves: Curves) -> list[Curves]:
    """The same curves, of the seeds that all of them have."""
    common = [seed for seed in curves[0].seeds if all(seed in each.seeds for each in curves)]
    return [each.only(common) for each in curves]
