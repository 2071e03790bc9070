"""The sandbox: a small procedural world in which the true reward is known, so that claims about feedback can be tested.

It is a simulation: nothing measured in it is evidence about GPT-4, about people or about LLaMA.
"""

from __future__ import annotations

from typing import Final

from ..data.dataset import Dataset
from .dataset import ASSETS, Sandbox
from .judges import gold_oracle, judge, utility_oracle
from .raters import raters

SANDBOX: Final[Dataset] = Sandbox()
POLICY: Final = ASSETS / "policy"
"""The SFT10k policy: a LLaMA of 0.4 M parameters."""
REWARD_MODEL: Final = ASSETS / "reward_model"
"""The surrogate reward model, trained on the labels of p_sim^ann (25 % flips)."""
REWARD_MODEL_CLEAN: Final = ASSETS / "reward_model_clean"
"""The same trained on gold's own labels."""

__all__ = [
    "POLICY",
    "REWARD_MODEL",
    "REWARD_MODEL_CLEAN",
    "SANDBOX",
    "gold_oracle",
    "judge",
    "raters",
    "utility_oracle",
]
