"""A reward function for verl. Source: verl 0.9, `NaiveRewardManager`.

reward.custom_reward_function.path=pkg://alpacafarm_env.integrations.verl
+reward.custom_reward_function.reward_kwargs.oracle=surrogate
"""

from collections.abc import Mapping
from typing import Any

from . import instruction_of, scorer


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    *,
    oracle: str | Mapping[str, Any] = "surrogate",
    dataset: str = "sandbox",
    seed: int = 0,
    **_: Any,
) -> float:
    """An oracle's score of one response; `extra_info` has the instruction, as `export --format verl` writes it.

    verl asks on several threads at once, which becomes one call of the oracle.
    """
    return scorer(dataset=dataset, oracle=oracle, seed=seed)([instruction_of(extra_info)], [solution_str])[0]
