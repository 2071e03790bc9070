"""What two processes of torchrun do in the tests: `python torchrun_jobs.py POLICY OUT`, or nothing but meet."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from agent_worlds import EXACT, RUNS
from tiny_worlds import ASCII, DEMONSTRATIONS, TEXTS, Share, TinyDataset, make_env, small_ppo

from alpacafarm_env.agents import DPO, PPO, SFT, ExpertIteration, SFTConfig
from alpacafarm_env.agents.loop import Loop, Resume
from alpacafarm_env.agents.processes import Processes
from alpacafarm_env.errors import AlpacaFarmError
from alpacafarm_env.wrappers.vector import AddScore

RANK = int(os.environ.get("RANK", "0"))


def train(policy: str, out: Path) -> None:
    """Every agent that has runs."""
    for name, make in {**RUNS, **EXACT}.items():
        make(Path(policy), out / name, seed=2).learn()


def disagree(policy: str, out: Path) -> None:
    """Runs that the two processes would begin differently; each writes down what it was told."""

    def begin(name: str, *, learning_rate: float = 1e-3, resume: Resume = "auto") -> SFT:
        config = SFTConfig(learning_rate=learning_rate, batch_size=5, epochs=1)
        return SFT(policy, DEMONSTRATIONS, config=config, out=out / name, resume=resume)

    def blind() -> SFT:
        """One process does not see the other's disk."""
        found = Loop._found
        with patch.object(Loop, "_found", staticmethod(lambda *given: None if RANK else found(*given))):
            return begin("kept")

    begin("kept").learn()
    data, ppo = TinyDataset(), small_ppo(max_response_tokens=4)
    attempts: dict[str, Callable[[], object]] = {
        "learning_rate": lambda: begin("settings", learning_rate=(1e-3, 2e-3)[RANK]),
        "out": lambda: begin(f"folder-{RANK}"),
        "newest checkpoint": blind,
        "resume='never'": lambda: begin("kept", resume=("auto", "never")[RANK]),
        "num_envs": lambda: PPO(make_env((8, 4)[RANK]), policy, config=ppo),
        "wrappers": lambda: PPO(
            (make_env(8), AddScore(make_env(8), key="share", oracle=Share(ASCII)))[RANK], policy, config=ppo
        ),
        "responses": lambda: DPO(policy, data.preferences()[RANK:]),
        "demonstrations": lambda: SFT(policy, DEMONSTRATIONS[RANK:]),
        "instructions_sha256": lambda: ExpertIteration(policy, TEXTS[RANK:], Share(ASCII)),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except AlpacaFarmError as error:
            with (out / f"told-{RANK}").open("a") as file:
                file.write(f"{name} -> {error}\n")
    begin("kept")  # they are still together


if __name__ == "__main__":
    Processes().together(lambda: None)
    for job in (train, disagree) if len(sys.argv) > 1 else ():
        job(sys.argv[1], Path(sys.argv[2]))
