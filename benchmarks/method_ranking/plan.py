"""The plan for LLaMA 7B: a command, the settings and the GPU hours of every method of the paper. Nothing is run.

Settings are read from the agents' `paper()` presets. GPU hours are the published ones (Dubois et al. 2023, AlpacaFarm,
arXiv 2305.14387: 8 x A100 with 80 GB); none was measured here, and what is scaled from them says so.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ...data.files import write_atomic
from ..harness.report import Table
from ..harness.report_text import text_table
from ..harness.stored import take_folder
from ..harness.study import Row, run_command, write_csv

DATASET = "tatsu-lab/alpaca_farm"
COLUMNS = ("method", "settings", "gpus", "gpu_hours", "basis", "note", "command")
"""Columns of plan.csv."""
NODE = 8
"""GPUs of the paper's machine."""
NUM_EVAL = 805
"""Instructions of eval."""
NUM_UNLABELED = 20_000
"""Instructions of the unlabeled split, for which best-of-16 took `HOURS_BEST_OF_16`."""
HOURS_SFT: Final = 1.0
"""Published upper bound for SFT and what is like it, on the whole node."""
HOURS_PPO: Final = 2.0
"""Published upper bound for PPO's first `STEPS_PPO` steps, on the whole node."""
STEPS_PPO = 80
"""The paper's best checkpoints are those of steps 40 to 80 (simulated: 20 to 80)."""
HOURS_DPO: Final = 3.0
"""Published upper bound for one epoch of DPO, on half of the node."""
HOURS_BEST_OF_16: Final = 4.0
"""Published for sampling and scoring best-of-16 of the unlabeled split, on the whole node."""
SHOWN = (
    "learning_rate",
    "schedule",
    "warmup_steps",
    "batch_size",
    "rollout_batch_size",
    "minibatch_size",
    "epochs",
    "num_epochs",
    "total_steps",
    "num_rounds",
    "num_samples",
    "beta",
    "kl_coef",
    "num_quantiles",
    "best_quantile_only",
    "temperature",
    "max_response_tokens",
)
"""Fields of a preset that the plan shows, where it has them, in this order."""
TRAINING = SHOWN[:3]
"""Those of them that every training config has."""

Basis = Literal["published upper bound", "published", "scaled from published", "not published"]

TOTALLED: Final[dict[Basis, str]] = {
    "published upper bound": "published upper bounds",
    "published": "as published",
    "scaled from published": "scaled from published ones",
}
"""Basis -> how the total calls its share."""


@dataclass(frozen=True)
class Step:
    """One line of the plan."""

    method: str
    """As `python -m alpacafarm_env.benchmarks.train` calls it; what comes before the methods is in parentheses."""
    config: Any
    """The preset."""
    gpus: int
    hours: float | None
    """Wall-clock hours on `gpus` GPUs; None where nothing was published."""
    basis: Basis
    reward: bool = False
    """Whether it needs the reward model."""
    note: str = ""

    @property
    def gpu_hours(self) -> float | None:
        """GPUs times hours."""
        return None if self.hours is None else self.gpus * self.hours

    @property
    def settings(self) -> str:
        """The preset's numbers, for instance "learning_rate=1e-05, batch_size=64"."""
        return settings_text(self.config)


@dataclass(frozen=True)
class Places:
    """What the commands name: to be replaced by folders or hub names of one's own."""

    base: str = "LLAMA7B"
    """The pretrained model, for the two steps before the methods."""
    policy: str = "SFT10K"
    reward_model: str = "RM"
    out: str = "FOLDER"
    dataset: str = DATASET
    lora: int = 8
    """Rank of the adapters; 0 for full fine-tuning, which needs more than 80 GB a GPU (`MEMORY`)."""


UNTRAINED, FULLY_TRAINED = "best_of_n", "reward_conditioning"
"""Methods that have no place for LoRA: one trains nothing, one trains new embeddings too."""
MEMORY = (
    "Memory: processes share the batch, not the model; each holds all weights, gradients and moments. Full fine-tuning "
    "of 6.7 billion weights by AdamW in float32 takes 16 bytes a weight, 107 GB a process, before reference and value "
    "model: more than the paper's GPUs of 80 GB have (its code shards the model over them). The commands therefore "
    "train LoRA adapters, which are float32, beside bfloat16 weights. Learning rates are still the paper's, for full "
    "fine-tuning; adapters usually want larger ones. Without --lora and --dtype the commands train all weights, as the "
    "two steps in Python do; --dtype bfloat16 alone saves nothing, since it keeps float32 masters (20 bytes a weight). "
    "AlpacaFarm's released SFT model can take the place of the first step. Its released reward models cannot take that "
    "of the second: they are no sequence-classification models, but a backbone and a reward head of its own code."
)


def plan() -> tuple[Step, ...]:
    """The steps in the order in which they can be run: the two that all others need, then the methods."""
    from ...agents.best_of_n import BestOfNConfig
    from ...agents.binary_feedme import BinaryFeedMEConfig
    from ...agents.dpo import DPOConfig
    from ...agents.expert_iteration import ExpertIterationConfig
    from ...agents.ppo import PPOConfig
    from ...agents.quark import QuarkConfig
    from ...agents.reward_conditioning import RewardConditioningConfig
    from ...agents.reward_modeling import RewardModelingConfig
    from ...agents.sft import SFTConfig

    ppo, best, expert = PPOConfig.paper(), BestOfNConfig.paper(), ExpertIterationConfig.paper()
    bound: Basis = "published upper bound"
    samples = NUM_EVAL * best.num_samples
    unlabeled = NUM_UNLABELED if expert.num_instructions is None else expert.num_instructions
    collected = expert.num_rounds * unlabeled * expert.num_samples
    all_steps = NODE * HOURS_PPO * ppo.total_steps / STEPS_PPO
    published_samples = NUM_UNLABELED * 16
    return (
        Step("(SFT 10k)", SFTConfig.paper(), NODE, HOURS_SFT, bound, note="the policy that every method starts from"),
        Step("(reward model)", RewardModelingConfig.paper(), NODE, HOURS_SFT, bound, note="counted as SFT-like"),
        Step("binary_feedme", BinaryFeedMEConfig.paper(), NODE, HOURS_SFT, bound),
        Step(
            "reward_conditioning",
            RewardConditioningConfig.paper(),
            NODE,
            HOURS_SFT,
            bound,
            note="trains all weights, as control tokens have embeddings of their own: 107 GB a process",
        ),
        Step("dpo", DPOConfig.paper(), NODE // 2, HOURS_DPO, bound),
        Step(
            "best_of_n",
            best,
            1,
            NODE * HOURS_BEST_OF_16 * samples / published_samples,
            "scaled from published",
            reward=True,
            note=f"{samples:,} samples on 1 GPU; published: {published_samples:,} in {HOURS_BEST_OF_16:g} h on {NODE}",
        ),
        Step(
            "expert_iteration",
            expert,
            NODE,
            HOURS_BEST_OF_16 * collected / published_samples + expert.num_rounds * HOURS_SFT,
            bound if collected == published_samples else "scaled from published",
            reward=True,
            note=f"sampling {HOURS_BEST_OF_16:g} h, SFT under {HOURS_SFT:g} h, a round",
        ),
        Step(
            "ppo",
            ppo,
            NODE,
            HOURS_PPO,
            bound,
            reward=True,
            note=f"for {STEPS_PPO} steps, where the paper's best checkpoints are; all {ppo.total_steps} in proportion: "
            f"{all_steps:.0f} GPU hours. Human labels: kl_coef={PPOConfig.paper(kl_coef=0.02).kl_coef:g}",
        ),
        Step("quark", QuarkConfig.paper(), NODE, None, "not published", reward=True),
    )


def command(step: Step, places: Places) -> str:
    """What to run for a step: a shell command, or Python for the two steps before the methods."""
    out = f"{places.out}/{step.method.strip('()').replace(' ', '_')}"
    if step.method == "(SFT 10k)":
        return (
            f'SFT("{places.base}", load_dataset("{places.dataset}").demonstrations("sft"), '
            f'config=SFTConfig.paper(), out="{out}").learn()'
        )
    if step.method == "(reward model)":
        return (
            f'RewardModeling("{places.policy}", load_dataset("{places.dataset}").preferences("preference"), '
            f'config=RewardModelingConfig.paper(), out="{out}").learn()'
        )
    words = [f"accelerate launch --num_processes {step.gpus} -m alpacafarm_env.benchmarks.train {step.method}"]
    words += ["--preset paper", f"--dataset {places.dataset}", f"--policy {places.policy}"]
    words += [f"--reward-model {places.reward_model}"] if step.reward else []
    words += [f"--out {out}"]
    if places.lora:
        words += [f"--lora {places.lora}"] if step.method not in (UNTRAINED, FULLY_TRAINED) else []
        words += ["--dtype bfloat16"] if step.method != FULLY_TRAINED else []
    return " ".join(words)


def settings_text(config: Any) -> str:
    """The fields of `SHOWN` that a preset has and that are not None; those of a config within it after its name."""
    names = {field.name for field in fields(config)}
    inner = sorted(name for name in names if is_dataclass(getattr(config, name)))
    # Where a config has another for its training (expert iteration), its own training fields are not used.
    shown = [name for name in SHOWN if name in names and not (inner and name in TRAINING)]
    parts = [f"{name}={value!r}" for name in shown if (value := getattr(config, name)) is not None]
    return ", ".join([*parts, *(f"{name}: ({settings_text(getattr(config, name))})" for name in inner)])


def totals(steps: Sequence[Step]) -> list[str]:
    """Sums of the GPU hours by what they rest on, in sentences."""
    sums: dict[Basis, float] = {}
    for step in steps:
        if step.gpu_hours is not None:
            sums[step.basis] = sums.get(step.basis, 0.0) + step.gpu_hours
    unknown = [step.method for step in steps if step.gpu_hours is None]
    parts = ", ".join(f"{hours:.0f} of them {TOTALLED[basis]}" for basis, hours in sums.items())
    sentences = [f"Total: {sum(sums.values()):.0f} GPU hours of A100 80 GB for one seed and one feedback, {parts}."]
    if unknown:
        sentences.append(f"Not in the total, because nothing was published: {', '.join(unknown)}.")
    sentences.append("None of these hours was measured by us, and evaluation's API calls are not in them.")
    return sentences


def plan_rows(steps: Sequence[Step], places: Places) -> list[Row]:
    """Rows of plan.csv."""
    return [
        {
            "method": step.method,
            "settings": step.settings,
            "gpus": step.gpus,
            "gpu_hours": None if step.gpu_hours is None else round(step.gpu_hours, 1),
            "basis": step.basis,
            "note": step.note,
            "command": command(step, places),
        }
        for step in steps
    ]


def plan_table(steps: Sequence[Step]) -> Table:
    """Method, GPUs and GPU hours with what they rest on."""
    rows = [(step.method, str(step.gpus), _hours(step), step.basis, step.note) for step in steps]
    return Table(("method", "GPUs", "GPU hours", "hours are", "note"), rows)


def write_plan(out: Path, places: Places | None = None) -> str:
    """Writes plan.md and plan.csv into `out` (made if it is missing) and returns the plan as text for a terminal."""
    places, steps = places or Places(), plan()
    out.mkdir(parents=True, exist_ok=True)
    rows, table = plan_rows(steps, places), plan_table(steps)
    write_csv(out / "plan.csv", rows, COLUMNS)
    write_atomic(out / "plan.md", _markdown(steps, rows, table, places))
    commands = [f"{row['method']}\n  {row['settings']}\n  {row['command']}" for row in rows]
    return "\n\n".join([text_table(table), "\n".join(totals(steps)), *commands, names_text(places), MEMORY])


def names_text(places: Places) -> str:
    """What the capital words of the commands are."""
    return (
        f"Replace {places.base} (the pretrained model), {places.policy} (the folder `policy` of the first step's last "
        f"checkpoint), {places.reward_model} (`reward` of the second's) and {places.out} by folders of your own. The "
        "first two steps are Python, for a script that `accelerate launch` starts: `from alpacafarm_env.agents import "
        "*` and `from alpacafarm_env.data import load_dataset`."
    )


def run(out: Path) -> int:
    """Writes and prints the plan; the exit status."""

    def work() -> int:
        with take_folder(out, "method_plan"):
            print(write_plan(out))
        print(f"\nWritten to {out}: plan.md, plan.csv. Nothing was run.")
        return 0

    return run_command(work)


def _hours(step: Step) -> str:
    if step.gpu_hours is None:
        return "–"
    return f"{'< ' if step.basis == 'published upper bound' else ''}{step.gpu_hours:.0f}"


def _markdown(steps: Sequence[Step], rows: Sequence[Row], table: Table, places: Places) -> str:
    text = io.StringIO()
    print("# Every method on LLaMA 7B: the plan", end="\n\n", file=text)
    print("Settings are the `paper()` presets of the agents. Nothing here was run.", end="\n\n", file=text)
    for cells in (table.header, ["---"] * len(table.header), *table.rows):
        print("| " + " | ".join(cells) + " |", file=text)
    print("", *totals(steps), "", names_text(places), "", MEMORY, sep="\n", file=text)
    for row in rows:
        language = "python" if row["method"].startswith("(") else "sh"
        print(f"\n## {row['method']}\n\n{row['settings']}\n\n```{language}\n{row['command']}\n```", file=text)
    return text.getvalue()
