"""The methods by name: the rows of the paper's table, one's own, and variants.

A variant answers one question: what of a method, or of its feedback, makes the difference? It is no row of the paper's
table and is run by name only:

    python -m alpacafarm_env.benchmarks.method_ranking --methods quark quark_no_eos --feedback simulated --out DIR
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ... import agents
from ...errors import UnknownNameError, did_you_mean
from ...instructions import Preference
from ...oracles.registry import make_oracle
from ...plugins import find_attribute
from ...sandbox import writers
from ...seeding import keyed_rng
from .methods import METHODS, Actor, Job, Method, StandIn, make_feedme, make_quark, make_reward_conditioning

__all__ = ["ABLATIONS", "METHODS", "find_method"]


def find_method(name: str) -> Method:
    """A method by its name, or any `Method` by `module:attribute`.

    Raises:
        UnknownNameError: There is no such method, module or attribute, or it is no `Method`.
    """
    if ":" not in name:
        by_name = {method.name: method for method in (*METHODS, *ABLATIONS)}
        if name not in by_name:
            raise did_you_mean("method", name, by_name)
        return by_name[name]
    found = find_attribute("Method", name)
    if not isinstance(found, Method):
        raise UnknownNameError(f"Method {name!r}: expected a Method, got {type(found).__name__}")
    return found


def coin_flips(job: Job) -> tuple[Preference, ...]:
    """The job's pairs with labels that say nothing: a coin for each."""
    pairs = job.preferences()
    coins = keyed_rng(job.seed, "coin labels").integers(1, 3, size=len(pairs)).tolist()
    return tuple(replace(pair, preference=coin) for pair, coin in zip(pairs, coins, strict=True))


def make_best_of_16_gold(job: Job) -> Actor:
    """Best-of-16 by the true reward: what a perfect reward model would give."""
    config = replace(job.config(agents.BestOfNConfig), num_samples=16)
    return agents.BestOfN(job.policy(), make_oracle("gold", dataset=job.data), config=config, seed=job.seed)


def make_crowd(job: Job) -> Actor:
    """Who wrote the demonstrations: what SFT imitates, and the more demonstrations the better."""
    return StandIn("crowd", writers.CROWD, job.seed)


FEEDME_COIN = partial(make_feedme, labels=coin_flips)
"""FeedME without feedback: more SFT, on either of the policy's own two samples."""
CONDITIONING_COIN = partial(make_reward_conditioning, labels=coin_flips)
ABLATIONS = (
    Method("crowd", "The crowd itself", make_crowd, "nothing", trained=False, effort=5),
    Method("feedme_coin", "FeedME, coin-flip labels", FEEDME_COIN, "preferences"),
    Method("conditioning_coin", "Conditioning, coin-flip labels", CONDITIONING_COIN, "preferences", effort=80),
    Method("quark_no_eos", "Quark, end not learned", partial(make_quark, train_eos=False), effort=100),
    Method("quark_all_quantiles", "Quark, all quantiles", partial(make_quark, best_quantile_only=False), effort=150),
    Method("quark_slow", "Quark, a tenth of the rate", partial(make_quark, learning_rate=6e-6), effort=100),
    Method("quark_fast", "Quark, PPO's rate", partial(make_quark, learning_rate=2e-4), effort=100),
    Method("best_of_16_gold", "Best-of-16 by gold", make_best_of_16_gold, "nothing", trained=False, effort=30),
)
