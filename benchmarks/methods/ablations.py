"""Variants of the methods that answer one question each: what of a method, or of its feedback, makes the difference?

    python -m alpacafarm_env.benchmarks.method_ranking --methods quark quark_no_eos --feedback simulated --out DIR

They are no rows of the paper's table and are run by name only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ...instructions import Preference
from ...oracles.registry import make_oracle
from ...sandbox import writers
from ...seeding import keyed_rng
from .methods import Actor, Job, Method, StandIn


def coin_flips(job: Job) -> tuple[Preference, ...]:
    """The job's pairs with labels that say nothing: a coin for each."""
    pairs = job.preferences()
    coins = keyed_rng(job.seed, "coin labels").integers(1, 3, size=len(pairs)).tolist()
    return tuple(replace(pair, preference=coin) for pair, coin in zip(pairs, coins, strict=True))


def make_feedme_coin(job: Job) -> Actor:
    """FeedME without feedback: more SFT, on either of the policy's own two samples."""
    from ...agents import BinaryFeedME, BinaryFeedMEConfig

    config = job.config(BinaryFeedMEConfig, epochs=1)
    return BinaryFeedME(job.policy(), coin_flips(job), config=config, seed=job.seed, out=job.folder)


def make_conditioning_coin(job: Job) -> Actor:
    """Reward conditioning on labels that say nothing."""
    from ...agents import BinaryRewardConditioning, RewardConditioningConfig

    config = job.config(RewardConditioningConfig, epochs=1)
    return BinaryRewardConditioning(job.policy(), coin_flips(job), config=config, seed=job.seed, out=job.folder)


def make_quark(job: Job, **changes: Any) -> Actor:
    """Quark with some settings changed."""
    from ...agents import Quark, QuarkConfig

    config = replace(job.config(QuarkConfig, total_steps=6), **changes)
    return Quark(job.env(config.rollout_batch_size), job.policy(), config=config, seed=job.seed, out=job.folder)


def make_best_of_16_gold(job: Job) -> Actor:
    """Best-of-16 by the true reward: what a perfect reward model would give."""
    from ...agents import BestOfN, BestOfNConfig

    config = replace(job.config(BestOfNConfig), num_samples=16)
    return BestOfN(job.policy(), make_oracle("gold", dataset=job.data), config=config, seed=job.seed)


def make_crowd(job: Job) -> Actor:
    """Who wrote the demonstrations: what SFT imitates, and the more demonstrations the better."""
    return StandIn("crowd", writers.CROWD, job.seed)


ABLATIONS = (
    Method("crowd", "The crowd itself", make_crowd, "nothing", trained=False, effort=5),
    Method("feedme_coin", "FeedME, coin-flip labels", make_feedme_coin, "preferences"),
    Method("conditioning_coin", "Conditioning, coin-flip labels", make_conditioning_coin, "preferences", effort=80),
    Method("quark_no_eos", "Quark, end not learned", partial(make_quark, train_eos=False), effort=100),
    Method("quark_all_quantiles", "Quark, all quantiles", partial(make_quark, best_quantile_only=False), effort=150),
    Method("quark_slow", "Quark, a tenth of the rate", partial(make_quark, learning_rate=6e-6), effort=100),
    Method("quark_fast", "Quark, PPO's rate", partial(make_quark, learning_rate=2e-4), effort=100),
    Method("best_of_16_gold", "Best-of-16 by gold", make_best_of_16_gold, "nothing", trained=False, effort=30),
)
