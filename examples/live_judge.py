"""What a judged win rate costs: LLM annotators over HTTP, with prices, a budget and a ledger.

    python examples/live_judge.py

The pool of 13 annotators compares the sandbox policy's answers with the references. It asks a judge server on this
machine, which judges as the sandbox's annotators do; the tokens are counted, and priced as those of the real models.
Any OpenAI-compatible server takes its place by --base-url. Three calls: the first pays, the second finds all answers in
the ledger, and the third, another opinion, is stopped by the budget, which keeps what was answered until then. With
`--ledger FILE --port 8001` another run finds the answers too: they are kept by the server's address.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro

import alpacafarm_env  # noqa: F401  # registers the environments
from alpacafarm_env import sandbox
from alpacafarm_env.agents import PolicyActor
from alpacafarm_env.annotators import JudgeServer
from alpacafarm_env.data import load_dataset
from alpacafarm_env.errors import BudgetExceededError
from alpacafarm_env.statistics import win_rate


@dataclass
class Options:
    """A win rate by LLM annotators, and its cost."""

    num: int = 805
    """Instructions of eval."""
    base_url: str | None = None
    """Of another server, up to /v1, which may cost money; its key is $OPENAI_API_KEY. None: a judge server here."""
    port: int = 0
    """Of the judge server here; 0 for any free one, where a --ledger of an earlier run has no answers."""
    models: str = "openai"
    """Who plays which role: "openai", "model=NAME", or a YAML file with models and prices."""
    budget_usd: float = 0.45
    """What the ledger may have spent in all."""
    ledger: Path | None = None
    """Where answers and costs are kept. None: a file that is thrown away."""


@contextmanager
def address(options: Options) -> Iterator[str]:
    """The server's, and of the judge server its life."""
    if options.base_url is not None:
        yield options.base_url
        return
    try:
        server = JudgeServer(port=options.port)
    except OSError as error:
        sys.exit(f"Cannot listen on --port {options.port}: {error.strerror}. Give another one.")
    with server:
        yield server.base_url


def main(options: Options) -> None:
    """Judges three times."""
    asked = load_dataset("sandbox").instructions("eval")[: options.num]
    responses = PolicyActor(sandbox.POLICY).act(asked)
    with tempfile.TemporaryDirectory() as folder, address(options) as base_url:
        pool = {
            "pool": "eval",
            "models": options.models,
            "base_url": base_url,
            "ledger": str(options.ledger or Path(folder) / "ledger.sqlite"),
            "budget_usd": options.budget_usd,
            "max_concurrency": 8,  # a request in flight counts its highest price: many together need a larger budget
        }
        for call, seed in (("first call", 0), ("again", 0), ("another opinion", 1)):
            oracle = {**pool, "seed": seed}
            envs = gym.make_vec("AlpacaFarm-WinRate-v0", len(asked), autoreset_mode="Disabled", oracle=oracle)
            envs.reset(options={"instruction_ids": [each.id for each in asked]})
            try:
                _, credits, _, _, infos = envs.step(responses)
            except BudgetExceededError as error:
                print(f"{call}: {error}")
                continue
            found, cost = win_rate(credits), infos["cost_usd"]
            told = f"{found.win_rate:.1f} % (standard error {found.standard_error:.1f}, n = {found.num_total})"
            print(f"{call}: win rate {told}, ${cost.sum():.4f}")
            families = np.array([name.rpartition("_")[0] for name in infos["annotator"]])  # "" for equal texts
            for family in sorted({*families} - {""}):
                own = families == family
                print(f"  {family:12} {own.sum():4} pairs  ${cost[own].sum():.4f}")


if __name__ == "__main__":
    main(tyro.cli(Options))
