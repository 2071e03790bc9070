"""What the two processes of the contract's tests do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from agent_worlds import EXACT, RUNS
from tiny_worlds import ASCII, DEMONSTRATIONS, TEXTS, Broke, Share, TinyDataset, make_env, small_ppo
from tracker import Recorder

from alpacafarm_env.agents import DPO, PPO, SFT, ExpertIteration, SFTConfig
from alpacafarm_env.agents.loop import Loop, Resume
from alpacafarm_env.errors import AlpacaFarmError
from alpacafarm_env.wrappers.vector import AddScore


def train_and_disagree(policy: Path, out: Path) -> None:
    """Every agent that has runs, then runs that cannot begin."""
    for name, make in {**RUNS, **EXACT}.items():
        make(policy, out / name, seed=2).learn()
    rank = int(os.environ["RANK"])
    tracker = Recorder(file=out / f"tracked-{rank}")
    stopped = RUNS["sft"](policy).learn(callback=lambda each: rank == 0 or each["step"] < 2, trackers=[tracker])
    (out / f"stopped-{rank}").write_text(str(stopped["step"]))
    disagree(str(policy), out)


def disagree(policy: str, out: Path) -> None:
    """Runs that the two processes would begin differently; each writes down what it was told."""
    rank = int(os.environ["RANK"])

    def begin(name: str, *, learning_rate: float = 1e-3, resume: Resume = "auto") -> SFT:
        config = SFTConfig(learning_rate=learning_rate, batch_size=5, epochs=1)
        return SFT(policy, DEMONSTRATIONS, config=config, out=out / name, resume=resume)

    def blind() -> SFT:
        """One process does not see the other's disk."""
        newest = Loop._newest
        with patch.object(Loop, "_newest", staticmethod(lambda *given: None if rank else newest(*given))):
            return begin("kept")

    begin("kept").learn()
    data, ppo = TinyDataset(), small_ppo(max_response_tokens=4)
    attempts: dict[str, Callable[[], object]] = {
        "learning_rate": lambda: begin("settings", learning_rate=(1e-3, 2e-3)[rank]),
        "out": lambda: begin(f"folder-{rank}"),
        "newest checkpoint": blind,
        "resume='never'": lambda: begin("kept", resume=("auto", "never")[rank]),
        "num_envs": lambda: PPO(make_env((8, 4)[rank]), policy, config=ppo),
        "wrappers": lambda: PPO(
            (make_env(8), AddScore(make_env(8), key="share", oracle=Share(ASCII)))[rank], policy, config=ppo
        ),
        "responses": lambda: DPO(policy, data.preferences()[rank:]),
        "demonstrations": lambda: SFT(policy, DEMONSTRATIONS[rank:]),
        "instructions_sha256": lambda: ExpertIteration(policy, TEXTS[rank:], Share(ASCII)),
        "out of money": lambda: PPO(make_env(8, Broke(ASCII)), policy, config=ppo).learn(),
        "of money": lambda: ExpertIteration(policy, TEXTS[:1], Broke(ASCII)).learn(),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except AlpacaFarmError as error:
            with (out / f"told-{rank}").open("a") as file:
                file.write(f"{name} -> {error}\n")
    begin("kept")  # they are still together
