"""The methods by name: the rows of the paper's Table 2, and variants.

A variant asks what makes the difference in a method or its feedback. It is no row of the paper's table and runs only
when it is named. A method of one's own is a `Method` in any importable module, named `module:attribute`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import methodcaller
from typing import Any, Literal, Protocol

from ... import agents
from ...arguments import match_name
from ...data import Dataset
from ...errors import DataError, UnknownNameError
from ...instructions import Demonstration, Instruction, Preference
from ...oracles import make_oracle
from ...plugins import find_attribute
from ...sandbox import writers
from ...sandbox.dataset import Sandbox
from ...seeding import keyed_rng
from ...templates import PromptTemplate
from .job import Job


class Actor(Protocol):
    """An agent as a method makes it. One that learns has `updates()`, which yields metrics, perhaps `num_steps`."""

    def act(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """A response to each instruction."""


@dataclass(frozen=True)
class Method:
    """A method of the ranking."""

    name: str
    """As in table.csv and on the command line."""
    title: str
    """For readers."""
    make: Callable[[Job], Any]
    """The untrained agent; the caller runs its `updates()`."""
    needs: Literal["nothing", "preferences", "reward"] = "reward"
    """The part of a feedback that it learns from. A method that needs nothing has one run for both feedbacks."""
    paper: tuple[float | None, float | None] = (None, None)
    """Win rate against Davinci003 in Table 2 of AlpacaFarm, %: trained on and judged by (simulated, human) feedback."""
    paper_note: str = ""
    """The paper's method, where it differs from ours."""
    trained: bool = True
    """Whether the ranking trains it, and does not only ask it."""
    fixed: bool = True
    """Whether its settings are fixed, if it needs nothing of a feedback."""
    effort: int = 60
    """Seconds it takes on one core, roughly: its weight in the progress report."""
    split: str | None = None
    """The split of one's own data that it learns from, "" if it only answers; None for the one that `needs` says."""

    @property
    def learns_from(self) -> str:
        """The split that it learns from; "" for none: it only answers, so it needs eval."""
        by_needs = {"nothing": "", "preferences": "preference", "reward": "unlabeled"}
        return by_needs[self.needs] if self.split is None else self.split


def make_sft(job: Job) -> Actor:
    """The SFT policy as it is."""
    return agents.PolicyActor(job.policy(), seed=job.seed)


def make_fine_tuning(job: Job) -> Actor:
    """SFT that goes on from the policy, on the demonstrations of split sft."""
    from ...agents.sft import FineTuningConfig

    config = job.config(FineTuningConfig, epochs=1, save_every=20)
    return agents.SFT(job.policy(), job.demonstrations(), config=config, seed=job.seed, out=job.folder)


def make_sft_52k(job: Job) -> Actor:
    """SFT from scratch on the demonstrations of all training splits, for as many epochs as take about the same time."""
    if not isinstance(job.data, Sandbox):
        raise DataError(f"sft_52k: expected the sandbox, got {job.dataset}: its demonstrations are written on demand.")
    policy = _untrained(job)
    splits = ("sft", "preference") if job.quick else ("sft", "preference", "unlabeled", "val")
    demonstrations = [each for split in splits for each in job.data.demonstrations(split)]
    config = replace(agents.SFTConfig.sandbox(), epochs=1 if job.quick else 3)
    return agents.SFT(policy, demonstrations, config=config, seed=job.seed, out=job.folder)


def make_base(job: Job) -> Actor:
    """A language model that has read pages about the world but no instruction; it continues the instruction's text."""
    if not isinstance(job.data, Sandbox):
        raise DataError(f"base: expected the sandbox, got {job.dataset}: its pages are written on demand.")
    policy = _untrained(job)
    policy.template = PromptTemplate(with_input="{instruction}\n{input}\n", without_input="{instruction}\n")
    pages = [writers.page(keyed_rng(job.seed, "page", number)) for number in range(8000)]
    read = [Demonstration(Instruction(heading), text) for heading, text in pages]
    config = replace(agents.SFTConfig.sandbox(), epochs=2)
    return agents.SFT(policy, read, config=config, seed=job.seed, out=job.folder)


def _untrained(job: Job) -> Any:
    """The SFT policy's architecture with new random weights."""
    import torch

    if job.lora:
        raise DataError(f"--lora: expected 0 for a method that trains from scratch, got {job.lora}.")
    policy = job.policy()
    with torch.random.fork_rng():  # transformers initialises from the global generator
        torch.manual_seed(job.seed)
        fresh = type(policy.model)(policy.model.config).to(policy.device)
    policy.model.load_state_dict(fresh.state_dict())
    return policy


def make_stand_in(job: Job, *, name: str) -> Actor:
    """The stand-in for a model behind an API, or the crowd that wrote the demonstrations which SFT imitates."""
    return writers.StandIn(name, writers.CROWD if name == "crowd" else writers.API_MODELS[name], job.seed)


Labels = Callable[[Job], tuple[Preference, ...]]


def coin_flips(job: Job) -> tuple[Preference, ...]:
    """The job's pairs with labels that say nothing: a coin flip for each."""
    pairs = job.preferences()
    coins = keyed_rng(job.seed, "coin labels").integers(1, 3, size=len(pairs)).tolist()
    return tuple(replace(pair, preference=coin) for pair, coin in zip(pairs, coins, strict=True))


def make_offline(
    job: Job, labels: Labels = methodcaller("preferences"), *, agent: str, kind: str, **quick: Any
) -> Actor:
    """An agent of this name that learns from labels, with the settings of that name; those in `quick` for --quick."""
    config = job.config(getattr(agents, kind), save_every=10, **quick)
    actor: Actor = getattr(agents, agent)(job.policy(), labels(job), config=config, seed=job.seed, out=job.folder)
    return actor


make_dpo = partial(make_offline, agent="DPO", kind="DPOConfig")
make_kto = partial(make_offline, agent="KTO", kind="KTOConfig")
make_feedme = partial(make_offline, agent="BinaryFeedME", kind="BinaryFeedMEConfig", epochs=1)
make_reward_conditioning = partial(
    make_offline, agent="BinaryRewardConditioning", kind="RewardConditioningConfig", epochs=1
)


def make_best_of_n(job: Job, **changes: Any) -> Actor:
    """Best-of-n with the preset's n, or with some settings changed."""
    config = replace(job.config(agents.BestOfNConfig, num_samples=8), **changes)
    policy = job.policy()
    return agents.BestOfN(policy, job.oracle(policy), config=config, seed=job.seed)


def make_best_of_16_gold(job: Job) -> Actor:
    """Best-of-16 by the true reward: what a perfect reward model would give."""
    config = replace(job.config(agents.BestOfNConfig), num_samples=16)
    return agents.BestOfN(job.policy(), make_oracle("gold", dataset=job.data), config=config, seed=job.seed)


def make_expert_iteration(job: Job) -> Actor:
    """Expert iteration."""
    instructions = job.data.instructions("unlabeled")
    config = job.config(agents.ExpertIterationConfig, num_instructions=400)
    if config.num_instructions is not None:
        config = replace(config, num_instructions=min(config.num_instructions, len(instructions)))
    policy = job.policy()
    oracle = job.oracle(policy)
    return agents.ExpertIteration(policy, instructions, oracle, config=config, seed=job.seed, out=job.folder)


def make_ppo(job: Job) -> Actor:
    """PPO."""
    config, policy = job.config(agents.PPOConfig, total_steps=6), job.policy()
    options: dict[str, Any] = {"value_init": job.value_start, "config": config, "seed": job.seed, "out": job.folder}
    return agents.PPO(job.env(config.rollout_batch_size, policy), policy, **options)


def make_online(job: Job, *, agent: str, kind: str, **changes: Any) -> Actor:
    """An agent of this name that samples as it learns, with the settings of that name, perhaps some changed."""
    config, policy = replace(job.config(getattr(agents, kind), total_steps=6), **changes), job.policy()
    env = job.env(config.rollout_batch_size, policy)
    actor: Actor = getattr(agents, agent)(env, policy, config=config, seed=job.seed, out=job.folder)
    return actor


make_quark = partial(make_online, agent="Quark", kind="QuarkConfig")


def _stand_in(name: str, title: str, paper: tuple[float, float]) -> Method:
    make, note = partial(make_stand_in, name=name), f"{title} there"
    return Method(name, f"{title} stand-in", make, "nothing", paper, note, trained=False, effort=5)


HELD_OUT, MOST_HELD_OUT = 0.05, 500
"""Share, and most, of the instructions whose pairs test the model and do not train it."""


def hold_out(preferences: Sequence[Preference]) -> tuple[list[Preference], list[Preference]]:
    """Pairs to train on and pairs to test on, of other instructions; the same in every run.

    Raises:
        DataError: There are pairs of one instruction only.
    """
    by_instruction: dict[str, list[Preference]] = {}
    for preference in preferences:
        by_instruction.setdefault(str(preference.instruction), []).append(preference)
    if len(by_instruction) < 2:
        raise DataError(f"Expected preferences on 2 or more instructions, got them on {len(by_instruction)}.")
    number = min(max(1, round(HELD_OUT * len(by_instruction))), MOST_HELD_OUT)
    chosen = set(keyed_rng(0, "held-out instructions").permutation(len(by_instruction))[:number].tolist())
    parts: tuple[list[list[Preference]], list[list[Preference]]] = [], []
    for place, pairs in enumerate(by_instruction.values()):
        parts[place in chosen].append(pairs)
    train, test = (list(chain.from_iterable(part)) for part in parts)
    return train, test


def make_reward_modeling(job: Job) -> agents.RewardModeling:
    """A reward model of the pairs that `hold_out` leaves; it answers nothing."""
    import torch

    return agents.RewardModeling(
        job.policy_folder,
        hold_out(job.preferences())[0],
        config=job.config(agents.RewardModelingConfig, epochs=1),
        seed=job.seed,
        out=job.folder,
        template=job.template,
        lora=job.adapter("SEQ_CLS"),
        dtype=getattr(torch, job.dtype or "float32"),
    )


PAGES = "LLaMA 7B there, pages about the world read here"
METHODS = (
    _stand_in("gpt4", "GPT-4", (79.0, 69.8)),
    _stand_in("chatgpt", "ChatGPT", (61.4, 52.9)),
    Method("ppo", "PPO", make_ppo, "reward", (46.8, 55.1), effort=130),
    Method("dpo", "DPO", make_dpo, "preferences", (46.8, None), effort=60),
    Method("best_of_n", "Best-of-n", make_best_of_n, "reward", (45.0, 50.7), "n = 1024 there", effort=80, split=""),
    Method("best_of_16", "Best-of-16", partial(make_best_of_n, num_samples=16), "reward", effort=30, split=""),
    Method("expert_iteration", "Expert iteration", make_expert_iteration, "reward", (41.9, 45.7), effort=120),
    Method("sft_52k", "SFT 52k", make_sft_52k, "nothing", (39.2, 40.7), "42k demonstrations here", False, effort=180),
    Method("sft", "SFT 10k", make_sft, "nothing", (36.7, 44.3), "", False, effort=5),
    Method("binary_feedme", "Binary FeedME", make_feedme, "preferences", (36.6, 37.9), effort=60),
    Method("quark", "Quark", make_quark, "reward", (35.6, None), effort=100),
    Method(
        "reward_conditioning", "Binary reward conditioning", make_reward_conditioning, "preferences", (32.4, None),
        effort=80,
    ),
    _stand_in("davinci001", "Davinci001", (24.4, 32.5)),
    Method("base", "Base model, no SFT", make_base, "nothing", (11.3, 6.5), PAGES, False, effort=30),
)  # fmt: skip
"""The rows of the paper's Table 2, best first, and best-of-16."""

REWARD_MODELING = "reward_modeling"
"""Trains no policy: `train` alone has it."""
FINE_TUNING = Method("sft", "SFT, continued", make_fine_tuning, "nothing", fixed=False, split="sft")
LATER_METHODS = (
    Method("kto", "KTO", make_kto, "preferences", effort=60),
    *(
        Method(name, title, partial(make_online, agent=agent, kind=kind), effort=100)
        for name, title, agent, kind in (
            ("grpo", "GRPO", "GroupPolicy", "GRPOConfig"),
            ("dr_grpo", "Dr. GRPO", "GroupPolicy", "DrGRPOConfig"),
            ("dapo", "DAPO", "GroupPolicy", "DAPOConfig"),
            ("gspo", "GSPO", "GroupPolicy", "GSPOConfig"),
            ("rloo", "RLOO", "GroupPolicy", "RLOOConfig"),
            ("reinforce_pp", "REINFORCE++", "GroupPolicy", "ReinforcePPConfig"),
            ("online_dpo", "Online DPO", "OnlineDPO", "OnlineDPOConfig"),
        )
    ),
)
"""Later than the paper: no rows of its table."""
RANKED = (*METHODS, *LATER_METHODS)
"""The rows of the ranking."""
CONDITIONING_COIN = partial(make_reward_conditioning, labels=coin_flips)
VARIANTS = (
    Method("crowd", "The crowd itself", partial(make_stand_in, name="crowd"), "nothing", trained=False, effort=5),
    Method("feedme_coin", "FeedME, coin-flip labels", partial(make_feedme, labels=coin_flips), "preferences"),
    Method("conditioning_coin", "Conditioning, coin-flip labels", CONDITIONING_COIN, "preferences", effort=80),
    Method("quark_no_eos", "Quark, end not learned", partial(make_quark, train_eos=False), effort=100),
    Method("quark_all_quantiles", "Quark, all quantiles", partial(make_quark, best_quantile_only=False), effort=150),
    Method("quark_slow", "Quark, a tenth of the rate", partial(make_quark, learning_rate=6e-6), effort=100),
    Method("quark_fast", "Quark, PPO's rate", partial(make_quark, learning_rate=2e-4), effort=100),
    Method("best_of_16_gold", "Best-of-16 by gold", make_best_of_16_gold, "nothing", trained=False, effort=30),
)
BY_NAME = {method.name: method for method in (*RANKED, *VARIANTS)} | {
    "fine_tuning": FINE_TUNING,
    REWARD_MODELING: Method(REWARD_MODELING, "Reward model", make_reward_modeling, "preferences"),
}


def check_splits(method: str, data: Dataset, *, judged: bool) -> None:
    """Refuses data without a split that a method uses. Only eval may be missing: then nothing is evaluated.

    Raises:
        DataError: There is no split to learn from; or no eval, and the method only answers, or a judge is to judge.
        UnknownNameError: As of `find_method`.
    """
    split, name = find_method(method).learns_from, find_method(method).name
    uses = {split: f"{name} learns from it"} if split else {"eval": f"{name} answers it"}
    if judged:
        uses.setdefault("eval", "--judge compares with its references")
    for needed, use in uses.items():
        if needed not in data.splits:
            raise DataError(f"{data.name}: expected the split {needed!r} ({use}), got {', '.join(data.splits)}.")


def find_method(name: str) -> Method:
    """A method by its name, or any `Method` by `module:attribute`.

    Raises:
        UnknownNameError: There is no such method, module or attribute, or it is no `Method`.
    """
    if ":" not in name:
        return BY_NAME[match_name("method", name, BY_NAME)]
    method = find_attribute("Method", name)
    if not isinstance(method, Method):
        raise UnknownNameError(f"Method {name!r}: expected a Method, got {type(method).__name__}")
    return method
