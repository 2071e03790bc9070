"""What tests of the pool share: pairs of the sandbox, the greedy annotator alone, a pool that asks a judge server."""

import numpy as np
from judge_requests import chances

from alpacafarm_env.annotators.config import AnnotatorConfig, PoolConfig
from alpacafarm_env.annotators.pool import AnnotatorPool
from alpacafarm_env.annotators.prompts import Item
from alpacafarm_env.judge_server.sandbox_judge import SandboxJudge
from alpacafarm_env.sandbox import SANDBOX

SINGLE = PoolConfig(
    name="single",
    annotators=(
        AnnotatorConfig(name="greedy_gpt4", role="gpt4", prompt="greedy_gpt4", max_tokens=250, temperature=0.0),
    ),
)
"""The greedy annotator, one pair a request."""


def unequal_pairs(count=400):
    """Instructions, first and second responses of stored pairs with two different responses."""
    rows = [row for row in SANDBOX.preferences("preference")[:count] if len(set(row.responses)) == 2]
    return [row.instruction for row in rows], *zip(*(row.responses for row in rows), strict=True)


def builder(folder):
    """A function that makes a pool that asks a server; its ledger is in the folder."""

    def build(server, pool="alpaca_farm", **options):
        defaults = {"base_url": server.base_url, "ledger": folder / "ledger.sqlite", "api_key": "sk-test"}
        return AnnotatorPool(pool, options.pop("models", "sandbox"), **{**defaults, **options})

    return build


def cut(pairs, count):
    return tuple(list(column[:count]) for column in pairs)


def truth(verdicts, instructions, a, b):
    """Rows whose verdict is the greedy annotator's likelier one, in the order that was shown."""
    b_first = verdicts.details["shown_first"] == "b"
    items = [
        Item(str(i), y, x) if swap else Item(str(i), x, y)
        for i, x, y, swap in zip(instructions, a, b, b_first, strict=True)
    ]
    second = chances(SandboxJudge(0), "greedy_gpt4", items) > 0.5
    return np.where(b_first, ~second, second) == (verdicts.scores == 1)
