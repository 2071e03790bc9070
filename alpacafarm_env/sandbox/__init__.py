"""The sandbox: a small procedural world in which the true reward is known, so that claims about feedback can be tested.

`SANDBOX` is the dataset, `gold_oracle()` the true reward, `judge(name)` a simulated annotator, `POLICY`, `REWARD_MODEL`
and `REWARD_MODEL_CLEAN` the folders of the shipped models. It is a simulation: nothing that is measured in it is
evidence about GPT-4, about people or about LLaMA.
"""

from __future__ import annotations

from typing import Final

from ..data.dataset import Dataset
from ..errors import did_you_mean
from ..oracles.base import PreferenceOracle, RewardOracle
from ..oracles.judges import Flip, HigherReward
from .dataset import ASSETS, Sandbox
from .gold import GoldOracle
from .judges import GREEDY, HUMANS, POOL, Annotators, Utility

SANDBOX: Final[Dataset] = Sandbox()
POLICY: Final = ASSETS / "policy"
"""The SFT10k policy: a LLaMA of 0.4 M parameters."""
REWARD_MODEL: Final = ASSETS / "reward_model"
"""The surrogate reward model, trained on the labels of p_sim^ann (25 % flips)."""
REWARD_MODEL_CLEAN: Final = ASSETS / "reward_model_clean"
"""The same trained on gold's own labels."""

_POOLS: Final = {"sim_eval": POOL, "sim_gpt4": GREEDY, "human": HUMANS}


def gold_oracle() -> RewardOracle:
    """The sandbox's true reward."""
    return GoldOracle()


def judge(name: str, seed: int = 0) -> PreferenceOracle:
    """A judge of the sandbox.

    Args:
        name: "sim_eval" (the pool of 13), "sim_ann" (the pool with 25 % of its labels flipped), "sim_gpt4" (one greedy
            annotator), "human" (16 raters) or "gold" (the truth).
        seed: Another seed is another opinion on the same pairs.

    Raises:
        UnknownNameError: No judge of that name.
    """
    if name == "sim_ann":
        return Flip(judge("sim_eval", seed), 0.25, seed=seed)
    if name == "gold":
        return HigherReward(GoldOracle())
    if name not in _POOLS:
        raise did_you_mean("judge", name, (*_POOLS, "sim_ann", "gold"))
    return Annotators(name, _POOLS[name], seed=seed)


def utility_oracle(name: str) -> RewardOracle:
    """The mean utility of a judge's annotators: what they want, without noise, order and reward model.

    Args:
        name: "sim_eval", "sim_gpt4" or "human".

    Raises:
        UnknownNameError: No such judge, or one without annotators.
    """
    if name not in _POOLS:
        raise did_you_mean("judge with utilities", name, _POOLS)
    return Utility(f"{name}_utility", _POOLS[name])
