"""One seed of the win-rate curve: trains PPO and, every few steps, evaluates the policy on val and eval.

Each evaluation is a file of the run's folder, written when it is done; PPO keeps a checkpoint at the same steps. A run
that was interrupted therefore continues where it stopped, and its numbers are those of a run that was not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode

from ..data import Dataset, load_dataset
from ..data.files import write_atomic
from ..folders import hash_model
from .agent_options import with_options
from .evaluation import Evaluation, Judges, evaluate, judges_of, subset
from .own_judge import has_references, judge_content, judge_settings
from .parallel import News, Tell, quiet
from .sources import Sources, data_content
from .stored import cell_file, read_stored
from .study import Row
from .win_rate_inputs import prompt_limit, prompt_room
from .win_rate_summary import MEASURES, WIN_RATES, number

if TYPE_CHECKING:
    from ..agents import PPO, LanguageModel, PPOConfig, Rollouts

SPLITS = ("val", "eval")


@dataclass(frozen=True)
class RunPlan:
    """All that decides one seed's run; picklable, so that it can be sent to a process."""

    seed: int
    folder: Path
    """The run's own folder: PPO's metrics and checkpoints, and evaluations/."""
    steps: int
    """PPO steps."""
    evaluate_every: int
    """Steps between evaluations; the first (0) and the last step are always evaluated."""
    num_val: int
    num_eval: int
    """How many instructions of val and eval are answered at each evaluation, always the same ones."""
    temperature: float
    """Sampling temperature of the evaluated responses."""
    dataset: str
    policy: str
    """Folder or hub name, or "sandbox"."""
    reward_model: str
    """Folder, or "sandbox"."""
    preset: str
    """The PPOConfig that is used, but for the number of steps: "sandbox" or "paper"."""
    max_prompt_tokens: int | None = None
    """Longest prompt trained on; None for all that fits."""
    judge: str | None = None
    """One's own, as `own_judge` reads it."""
    changed: tuple[tuple[str, float], ...] = ()
    """Fields of the preset that have other values: (name, value)."""
    allow_overlap: bool = False
    """Whether an instruction may stand in two splits."""

    template: str | None = None
    """Name of the prompt template of models that are not the sandbox's; None for what their folders say."""

    @property
    def cell(self) -> str:
        """Name of the study's cell."""
        return f"seed {self.seed}"

    @property
    def proxy(self) -> str | dict[str, str]:
        """The training reward, as an oracle's specification."""
        named = {"template": self.template} if self.template else {}
        return "surrogate" if self.reward_model == "sandbox" else {"reward_model": self.reward_model, **named}

    @property
    def policy_template(self) -> str | None:
        """Name of the policy's template, None for what its folder says."""
        return None if self.policy == "sandbox" else self.template

    @property
    def data(self) -> Dataset:
        """The dataset."""
        return load_dataset(self.dataset, allow_overlap=self.allow_overlap)

    @property
    def model_folders(self) -> tuple[str, str]:
        """Where policy and reward model are."""
        if "sandbox" not in (self.policy, self.reward_model):
            return self.policy, self.reward_model
        from ..sandbox import POLICY, REWARD_MODEL

        shipped = ((self.policy, POLICY), (self.reward_model, REWARD_MODEL))
        policy, reward_model = (str(folder) if name == "sandbox" else name for name, folder in shipped)
        return policy, reward_model

    @property
    def sizes(self) -> dict[str, int]:
        """Split -> how many of its instructions are wanted."""
        return dict(zip(SPLITS, (self.num_val, self.num_eval), strict=True))

    @property
    def evaluated_steps(self) -> tuple[int, ...]:
        """Steps after which the policy is evaluated, 0 (before training) first."""
        return tuple(sorted({*range(0, self.steps, self.evaluate_every), self.steps}))

    @property
    def units(self) -> int:
        """Units of work for the progress report, see `units_done`."""
        return self.units_done(self.steps)

    @property
    def max_response_tokens(self) -> int:
        """Longest response, in training and in evaluations: the preset's, else AlpacaFarm's 300."""
        return self.ppo_config().max_response_tokens or 300

    def ppo_config(self) -> PPOConfig:
        """The preset with this plan's steps, and checkpoints at evaluated steps only."""
        from ..agents import PPOConfig

        preset = {"sandbox": PPOConfig.sandbox, "paper": PPOConfig.paper}[self.preset]()
        return with_options(replace(preset, total_steps=self.steps, save_every=self.evaluate_every), self.changed)

    def settings(self) -> dict[str, Any]:
        """What decides the rows of every seed beside `sources`, JSON-able: a folder of other values is refused."""
        left_out = {"seed", "folder", "changed", "allow_overlap"}
        left_out |= {"dataset", "policy", "reward_model"}  # see `sources`
        plan = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        ppo = {name: value for name, value in asdict(self.ppo_config()).items() if name != "micro_batch_tokens"}
        return {**plan, "judge": judge_settings(self.judge), "ppo": ppo}

    @property
    def sources(self) -> Sources:
        """Data and models, by the options that name them; where they lie does not matter."""
        policy, reward_model = self.model_folders
        return {
            "--dataset": partial(data_content, self.dataset, allow_overlap=self.allow_overlap),
            "--policy": partial(hash_model, policy),
            "--reward-model": partial(hash_model, reward_model),
            **({} if self.judge is None else {"--judge": partial(judge_content, self.judge)}),
        }

    def units_done(self, step: int) -> int:
        """Units done once `step` steps and their evaluations are.

        An evaluation counts one a response. A step counts two, for it samples and then learns: measured, 2.7 in the
        sandbox and 1.3 with a policy of 1 M parameters and a reward model for a judge.
        """
        evaluations = sum(evaluated <= step for evaluated in self.evaluated_steps)
        return 2 * step * self.ppo_config().rollout_batch_size + evaluations * self.evaluation_units

    @property
    def evaluation_units(self) -> int:
        """Those of one evaluation."""
        return self.num_val + self.num_eval

    def evaluation_file(self, step: int) -> Path:
        """Where the evaluation after a step is kept."""
        return self.folder / "evaluations" / f"step-{step:05}.json"


def run_seed(plan: RunPlan, tell: Tell) -> list[Row]:
    """Trains and evaluates; rows of `COLUMNS` and "split", for val and eval at each evaluated step.

    In a world of processes all train and answer together; the main one alone judges, writes and has rows.
    """
    from ..agents.processes import Processes

    quiet()
    world = Processes()
    plan.evaluation_file(0).parent.mkdir(parents=True, exist_ok=True)
    agent = make_agent(plan)
    judges = judges_of(plan.data, proxy=plan.proxy, own=plan.judge) if world.is_main else Judges()
    for step in completed_steps(agent, plan):
        due = world.from_main(step in plan.evaluated_steps and not plan.evaluation_file(step).exists())
        tell(News(plan.cell, plan.units_done(step) - due * plan.evaluation_units))
        if due:
            tell(News(plan.cell, plan.units_done(step), evaluate_policy(plan, agent, judges, step)))
    steps = plan.evaluated_steps if world.is_main else ()
    return [row for step in steps for row in read_evaluation(plan, step)["rows"]]


def make_agent(plan: RunPlan) -> PPO:
    """PPO on AlpacaFarm-PPO-v0 of the plan's data, with the plan's policy and reward model."""
    from ..agents import PPO, LanguageModel
    from ..agents.processes import Processes, default_device

    config = plan.ppo_config()
    env = gym.make_vec(
        "AlpacaFarm-PPO-v0",
        num_envs=config.rollout_batch_size // Processes().count,
        dataset=plan.data,
        oracle=plan.proxy,
        autoreset_mode=AutoresetMode.DISABLED,
    )
    folder, reward_model = plan.model_folders
    policy = LanguageModel.from_pretrained(
        folder,
        device=default_device(),
        template=plan.policy_template,
        max_prompt_tokens=prompt_limit(plan),
        max_response_tokens=plan.max_response_tokens,
    )
    agent = PPO(env, policy, value_init=reward_model, config=config, seed=plan.seed, out=plan.folder)
    policy.max_prompt_tokens = prompt_room(plan)  # what training leaves out is settled; evaluations ask all
    return agent


def completed_steps(agent: PPO, plan: RunPlan) -> Iterator[int]:
    """Steps as they are completed, beginning with the one training starts from: 0, or that of a resumed checkpoint.

    A checkpoint is written before its step is evaluated, so the evaluation of a resumed step may be missing still;
    those before it are not, since checkpoints are written at evaluated steps only.
    """
    from ..agents import checkpoints

    yield max((step for step in checkpoints.steps(plan.folder)), default=0)
    for metrics in agent.updates():
        yield int(metrics["step"])


def evaluate_policy(plan: RunPlan, agent: PPO, judges: Judges, step: int) -> str:
    """Evaluates on val and eval, writes the evaluation's file and returns a line about eval for the progress report.

    Each process answers its share; the main one alone judges and writes, the others return no line.
    """
    import torch

    from ..agents.processes import Processes

    world = Processes(agent.policy.device)
    dataset = plan.data
    rows: list[Row] = []
    unscored: dict[str, dict[str, int]] = {}
    for split, wanted in plan.sizes.items():
        instructions = dataset.instructions(split)
        chosen = [instructions[index] for index in subset(len(instructions), wanted)]
        mine = slice(world.rank, None, world.count)
        rollouts = answer(agent, chosen, seed=plan.seed, split=split, temperature=plan.temperature, rows=mine)
        kl = sequence_kl(agent.policy, rollouts, plan.temperature)
        numbers = range(len(chosen))[mine]
        parts = world.gather(list(zip(numbers, rollouts.texts, rollouts.finished.tolist(), kl.tolist(), strict=True)))
        if not world.is_main:
            continue
        _, texts, finished, kls = zip(*sorted(chain.from_iterable(parts)), strict=True)
        asked = judges if has_references(dataset, split) else replace(judges, win_rate=None)
        found = evaluate(chosen, texts, asked, finished=finished)
        means = {**found.means(), "kl": float(torch.tensor(kls).mean())}
        measured = {name: means.get(name, math.nan) for name in MEASURES}
        rows.append({"split": split, "seed": plan.seed, "step": step, **measured})
        unscored[split] = found.unscored()
    if not world.is_main:
        return ""
    content = {"rows": rows, "unscored": unscored, "eval": per_response(found)}
    write_atomic(plan.evaluation_file(step), json.dumps(content) + "\n")
    return f"{plan.cell}, step {step} of {plan.steps}: {describe(rows[-1])}"


def answer(
    agent: PPO,
    instructions: Sequence[str],
    *,
    seed: int,
    split: str,
    temperature: float,
    rows: slice = slice(None),
) -> Rollouts:
    """Samples one response to each instruction of `rows`, with the length limit of training.

    The random numbers are keyed on (seed, split) and not on the step: every evaluation of a seed sees the same draws
    (common random numbers), so that differences between steps are due to the policy. They are drawn for all
    instructions, so that a response does not depend on `rows`.
    """
    import torch

    from ..agents.loop import keyed_generator

    limit = agent.config.max_response_tokens or agent.policy.max_response_tokens
    uniforms = torch.rand(len(instructions), limit, generator=keyed_generator(seed, "evaluation", split))
    return agent.policy.generate(
        instructions[rows], generator=uniforms[rows], temperature=temperature, max_new_tokens=limit
    )


def sequence_kl(policy: LanguageModel, rollouts: Rollouts, temperature: float, *, max_tokens: int = 16384) -> Any:
    """[B] log p(response) - log p_ref(response) in nats, both at the temperature the responses were sampled at.

    The k1 estimator: its mean is an unbiased estimate of KL(policy || reference) of the two distributions that are
    compared, those the evaluated responses come from. (At another temperature than the samples' it would be biased.)
    Source: Schulman 2020, "Approximating KL divergence".
    """
    import torch

    from ..agents.rollouts import micro_batches, segment_sum

    kl = torch.zeros(len(rollouts))
    with torch.no_grad():
        for rows in micro_batches(rollouts.total_lengths, max_tokens):
            part = rollouts[rows]
            difference = part.logprobs - policy.logprobs(part, role="reference", temperature=temperature)
            kl[rows] = segment_sum(difference, part.lengths).cpu()
    return kl


def per_response(found: Evaluation) -> dict[str, list[Any]]:
    """The evaluation's values per response, JSON-able; NaN as null."""
    scores = {
        name: [None if value != value else value for value in values.tolist()] for name, values in found.scores.items()
    }
    return {
        "instructions": list(found.instructions),
        "responses": list(found.responses),
        **scores,
        "finished": found.finished.tolist(),
    }


def read_evaluation(plan: RunPlan, step: int) -> dict[str, Any]:
    """What `evaluate_policy` wrote.

    Raises:
        CheckpointError: It is gone or damaged.
    """
    cell = cell_file(plan.folder.parent.parent, plan.cell)
    remedy = f"To run the seed anew remove {plan.folder} and, if it is there, {cell}, and call again."
    shape = {
        "rows": [dict.fromkeys(("split", "seed", "step", *MEASURES), object)],
        "unscored": dict,
        "eval": dict.fromkeys(("instructions", "responses", "finished"), list),
    }
    return read_stored(plan.evaluation_file(step), *shape, shape=shape, remedy=remedy)


def describe(row: Row) -> str:
    """One line about an evaluation; measures that do not exist at this level are left out."""
    names = {
        "proxy": "proxy {}",
        "gold": "gold {}",
        "win_rate_simulated": "win rate {} % simulated",
        "win_rate_human": "{} % human",
        "win_rate": "win rate {} % by the judge",
        "kl": "KL {}",
        "length": "length {}",
    }
    units = {**dict.fromkeys(WIN_RATES, "%"), "length": "characters"}
    return ", ".join(
        text.format(number(row[name], units.get(name, ""))) for name, text in names.items() if row[name] == row[name]
    )
