"""Eight instructions: the policy's answer that a proxy likes best, and the one that gold likes best."""

from __future__ import annotations

import numpy as np

from ..harness.runner import ProgressFn, ProgressUpdate, quiet
from ..harness.study import Row
from .golds import read_scores
from .plan import Plan, world_of
from .training import Proxy, own_half

SHOWN = 8
FLIP_AT = 1
"""Which of the shares of flips the proxy's labels have: the lowest above none."""


def text_cell(plan: Plan, key: str, on_progress: ProgressFn) -> list[Row]:
    """Two rows an instruction; of the instruction only its number in the recorded folder, whose licence is another."""
    quiet()
    on_progress(ProgressUpdate(key, 0))
    half, world = own_half(plan), world_of(plan)
    proxy = Proxy(plan, plan.sizes.flips[FLIP_AT], 0)
    golds = {name: read_scores(plan, name) for name in ("a", "b")}
    rows: list[Row] = []
    for place in half.places[:SHOWN]:
        texts, gold = plan.texts(place), golds["a"][place]
        liked = proxy.score([world.at(place)] * len(texts), texts)
        values = {"proxy": liked, "gold_a": gold[: len(texts)], "gold_b": golds["b"][place][: len(texts)]}
        for who in ("proxy", "gold_a"):
            best = int(np.nanargmax(values[who]))
            scores = {name: float(each[best]) for name, each in values.items()}
            ranks = {f"{name}_rank": int((each > each[best]).sum()) + 1 for name, each in values.items()}
            number = world.answered[place]
            row = {"instruction": number, "samples": len(texts), "best_by": who, "text": texts[best]}
            rows.append({"table": "texts", **row, **scores, **ranks})
    return rows
