"""Expert iteration: sample n responses to each instruction, then fine-tune the policy on the best of each.

Source: Anthony et al. 2017 (arXiv:1705.08439) for the idea; as used for language models by AlpacaFarm (Dubois et al.
2023, arXiv:2305.14387), sec. 4, whose numbers are `ExpertIterationConfig.paper()`. One round:

1. best-of-n (`best_of_n.BestOfN`) from the policy as it is now, on every instruction;
2. supervised fine-tuning (`sft.SFT`) of the policy on the best responses.

So a round teaches the policy to answer at once as best-of-n would. For rewards r = log F, where F is the share of the
policy's responses that are no better, the best of n is the policy tilted by exp(r / β) with β = 1 / (n - 1), as long as
no single response is likely.

Deviations from AlpacaFarm's released code, besides those of `best_of_n` and `sft`:

1. A response is imitated with an end-of-sequence token if and only if it ended by itself when it was sampled. The
   script's texts all get one, so that the policy learns to stop where it was cut off.
2. Instructions without any verdict are left out and counted (`reward/unscored`); so are, uncounted, best responses that
   were cut off and have no text.
3. Sampling and training are one run, which stores its best responses as it goes and can be stopped at any moment. The
   released path is two scripts and a file between them; it cannot select the instructions, and needs a validation split
   that this file does not have. Here there is none.
4. More than one round is possible (`num_rounds`); the paper makes one.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from ..bases import read_json
from ..data.files import write_atomic
from ..errors import CheckpointError, UnscoredError
from ..folders import Claim
from ..instructions import Demonstration, Instruction
from ..monitors.runs import ROLLOUTS, append_rollouts, without_nan
from ..oracles.base import RewardOracle
from ..seeding import keyed_rng
from . import checkpoints
from .best_of_n import BestOfN, BestOfNConfig, best_responses, reward_metrics
from .language_model import LanguageModel
from .loop import Resume
from .policy_agent import PolicyAgent, PolicyConfig, fitting
from .precision import Precision
from .processes import Processes, settled
from .settings import FREE_TO_CHANGE, Count, Natural, Positive, TrainingConfig
from .sft import SFT, Imitation, SFTConfig
from .tracking import append_line


@dataclass(frozen=True, kw_only=True)
class ExpertIterationConfig(PolicyConfig):
    """Settings of expert iteration; the defaults are AlpacaFarm's for LLaMA 7B.

    All about training, such as the learning rate and checkpoints, belongs to `sft`; inherited fields stay as they are.
    """

    num_samples: Count = 16
    """Responses sampled for each instruction, n."""
    num_rounds: Count = 1
    """Rounds of sampling and fine-tuning."""
    num_instructions: Count | None = None
    """How many of the instructions are used, a random choice that is the same in every round; None: all."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    max_response_tokens: Count | None = None
    """Longest response sampled; None: the policy's own limit (AlpacaFarm: 300)."""
    instructions_per_step: Count = 64
    """Instructions sampled and stored in one step: a killed run loses at most that many."""
    sample_batch_size: Count = 256
    """Rows decoded together: memory and speed only."""
    keep_rollouts: Natural = 64
    """Best responses of a step, the first, that are kept in the run's rollouts.jsonl.gz; 0: none."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    """Settings of the fine-tuning of each round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for shared in fields(TrainingConfig):
            kept = getattr(self, shared.name) == shared.default
            self.require(kept, shared.name, f"left alone: set it in sft=SFTConfig({shared.name}=...)")

    @classmethod
    def paper(cls) -> Self:
        """AlpacaFarm's settings for LLaMA 7B: best of 16, one round, then SFT with the settings of SFT 10k."""
        return cls(max_response_tokens=300, sft=SFTConfig.paper())

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small policy on two CPU cores."""
        sft = replace(SFTConfig.sandbox(), epochs=3, batch_size=32, learning_rate=4e-4, save_every=100)
        return cls(num_instructions=5000, max_response_tokens=64, sft=sft)


FREE = frozenset({"sample_batch_size", "keep_rollouts", "act_temperature", "num_processes"})
"""Settings that a resumed run may change: they do not decide what is learned. Of `sft`: `settings.FREE_TO_CHANGE`."""


class ExpertIteration(PolicyAgent):
    """Trains a policy on its own best responses; a step is one chunk of sampling or one update of fine-tuning.

    For round r from 1, a run's folder holds `round-r/chunk-<k>.json`, the `best_responses` to each
    `instructions_per_step` instructions and their metrics, and `round-r/sft/`, metrics and checkpoints of the
    fine-tuning, whose last one is the round's policy; next to them config.json and metrics.jsonl, the metrics of all
    steps.

    Args:
        instructions: What to respond to. Equal texts get equal responses.
        oracle: Scores; each process asks its own, unless it is `paid`. Other arguments as of `PolicyAgent`.

    Raises:
        ValueError: There are no instructions, or fewer than `num_instructions`.
        CheckpointError: The run in `out` has other settings, or starts from other weights.
    """

    label: ClassVar[str] = "Expert iteration"

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        instructions: Sequence[Instruction],
        oracle: RewardOracle,
        *,
        config: ExpertIterationConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        self.config = config or ExpertIterationConfig()
        super().__init__(policy, self.config, seed=seed, max_act_tokens=self.config.max_response_tokens)
        if self.policy.sampler is not None:
            self.policy.sampler.check_trainable()  # before a round is sampled
        self.oracle, self.out = oracle, None if out is None else Path(out)
        self._longest = self.config.max_response_tokens or self.policy.max_response_tokens
        self.instructions = self._chosen(instructions)
        self._num_done = 0
        self._round = 1
        self._best: list[dict[str, Any]] = []
        self._sft: SFT | None = None
        self._length = 0  # of metrics.jsonl as this run has left it
        self._processes = Processes(self.policy.device)
        self.policy.precision = cast(Precision, settled(self.config.sft, self.policy.model).precision)
        self._processes.agree(self._settings())
        if self.out is not None:
            self._open(self.out, resume)

    def updates(self) -> Iterator[dict[str, float]]:
        """Sample and train, one step at a time.

        Yields:
            step, round, and of a chunk of sampling, over all processes: reward/best, reward/mean: the mean reward of
                the best and of all responses; reward/unscored: share of instructions left out; finished: share of best
                responses that ended by themselves; tokens: how many were sampled; instructions: how many of the round's
                are done. Of an update of fine-tuning: what `SFT.updates` yields.

        Raises:
            UnscoredError: No instruction of a round has a reward.
        """
        place = self.out if self._processes.is_main else None
        with self._processes.together(lambda: checkpoints.claim_metrics(place, self._length)):
            while self._round <= self.config.num_rounds:
                while len(self._best) < len(self.instructions):
                    yield self._done(*self._sample())
                if self._sft is None:
                    self._sft = self._begin_sft()
                for metrics in self._sft.updates():
                    yield self._done(metrics)
                self._next_round()

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._num_done

    @property
    def num_rounds_done(self) -> int:
        """Rounds whose fine-tuning is over and whose successor, if any, has begun: the policy is that of their end."""
        return self._round - 1

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; fewer if instructions are left out."""
        sft, size = self.config.sft, len(self.instructions)
        updates = sft.epochs * math.ceil(size / sft.batch_size)
        return self.config.num_rounds * (math.ceil(size / self.config.instructions_per_step) + updates)

    def _run(self) -> dict[str, Any]:
        run = {"config": self.config, "seed": self.seed, "out": self.out, "processes": self._processes}
        return {**run, "stop": self._keep}

    def _keep(self) -> None:
        """Save what is not: chunks of sampling are stored anyway."""
        if self._sft is not None:
            self._sft._loop.keep()

    def _sample(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Sample, score and store the next chunk of the round; its metrics and best responses."""
        first, processes, config = len(self._best), self._processes, self.config
        chunk = range(len(self.instructions))[first : first + config.instructions_per_step]
        mine = chunk[processes.rank :: processes.count]
        sampling = BestOfNConfig(
            num_samples=config.num_samples,
            temperature=config.temperature,
            max_response_tokens=config.max_response_tokens,
            batch_size=config.sample_batch_size,
        )
        seed = round_seed(self.seed, self._round, "sampling")
        best_of_n = BestOfN(self.policy, self.oracle, config=sampling, seed=seed)
        samples = best_of_n.sample([self.instructions[row] for row in mine], processes=processes)
        own = best_responses(mine, samples)
        rows = sorted(chain.from_iterable(processes.gather(own)), key=itemgetter("row"))
        metrics = {
            **reward_metrics(rows),
            "tokens": processes.add_up({"tokens": samples.num_tokens})["tokens"],
            "instructions": chunk.stop,
        }
        if self.out is not None:
            if processes.is_main:
                chunk_file = self._chunk_file(first)
                with checkpoints.writing(chunk_file):
                    chunk_file.parent.mkdir(exist_ok=True)
                    content = {"metrics": without_nan(metrics), "best": rows}
                    write_atomic(chunk_file, json.dumps(content, allow_nan=False))
                    for path in (chunk_file, chunk_file.parent):  # before the metrics and checkpoints made of it
                        checkpoints.flush(path)
            processes.wait()
        self._best += rows
        return metrics, rows

    def _begin_sft(self) -> SFT:
        """The round's SFT on its best responses, as far as its folder has come; the steps it has made count as done."""
        if all(best["response"] is None for best in self._best):
            raise UnscoredError(
                f"Round {self._round}: the oracle {self.oracle.name!r} scored no response to any of "
                f"{len(self._best)} instructions, so there is nothing to learn from."
            )
        folder = None if self.out is None else self._round_folder() / "sft"
        answered = [best for best in self._best if best["response"] is not None]
        sft = Imitation(
            self.policy,
            [Demonstration(self.instructions[best["row"]], best["response"]) for best in answered],
            [best["finished"] for best in answered],
            longest=self._longest,
            config=self.config.sft,
            seed=round_seed(self.seed, self._round, "sft"),
            out=folder,
        )
        if folder is not None and sft._loop.step:
            for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
                self._done(json.loads(line))
        return sft

    def _next_round(self) -> None:
        self._round, self._best, self._sft = self._round + 1, [], None

    def _open(self, out: Path, resume: Resume) -> None:
        """Begin the run's folder, or continue it: the policy becomes what it was."""
        # Of the policy as it was given, so before anything is read into it.
        identity = {**self._settings(), "policy_sha256": checkpoints.starting_point(self.policy.model)}
        self._processes.agree({**identity, "out": str(out.resolve())})
        stored = self._processes.together(lambda: self._stored(out, resume, identity))
        self._processes.agree({"stored in out": stored})
        with self._processes.together(lambda: self._begin(out, None if stored else identity)):
            self._restore()
        self._processes.wait()

    @staticmethod
    def _stored(out: Path, resume: Resume, identity: Mapping[str, Any]) -> list[str]:
        """The names of the run's folders."""
        paths = (path for pattern in ("round-*", "round-*/*", "round-*/sft/checkpoint-*") for path in out.glob(pattern))
        stored = sorted(path.relative_to(out).as_posix() for path in paths)
        if stored and resume == "never":
            rounds = ", ".join(name for name in stored if "/" not in name)
            raise CheckpointError(
                f"{out} holds a run ({rounds}), and resume='never' would overwrite it. "
                "Take another folder, or remove it to start over."
            )
        if stored:
            checkpoints.compare(out / "config.json", identity, free=FREE)
        return stored

    def _begin(self, out: Path, identity: Mapping[str, Any] | None) -> AbstractContextManager[object]:
        """Claim the folder, note what decides the run if it is new, and begin metrics.jsonl and `ROLLOUTS` anew."""
        if not self._processes.is_main:
            return nullcontext()
        held = Claim(out, "a training run")
        if identity is not None:
            checkpoints.write_json(out / "config.json", identity)
            checkpoints.flush(out / "config.json")  # on disk before the first chunk is
        for draft in out.glob("round-*/.chunk-*"):
            draft.unlink()
        (out / "metrics.jsonl").write_bytes(b"")
        (out / ROLLOUTS).unlink(missing_ok=True)
        return held

    def _restore(self) -> None:
        """Take up what the folder holds, up to the last complete step, and write metrics.jsonl anew from it."""
        while self._round <= self.config.num_rounds:
            while len(self._best) < len(self.instructions):
                chunk_file = self._chunk_file(len(self._best))
                if not chunk_file.exists():
                    return
                try:
                    chunk = read_json(chunk_file)
                except CheckpointError as error:
                    raise CheckpointError(f"{error} Remove the file: its samples are drawn again.") from error
                self._best += chunk["best"]
                self._done(chunk["metrics"], chunk["best"])
            if not checkpoints.steps(self._round_folder() / "sft"):
                return
            self._sft = self._begin_sft()
            if self._sft._loop.step < self._sft.num_steps:
                return
            self._next_round()

    def _done(self, metrics: Mapping[str, float], best: Sequence[Mapping[str, Any]] = ()) -> dict[str, float]:
        """Count a step and write its metrics down, and of a chunk of sampling the first of the best responses."""
        self._num_done += 1
        metrics = {**metrics, "step": self.step, "round": self._round}
        if self.out is not None and self._processes.is_main:
            row = without_nan({"step": self.step, "round": self._round, **metrics})
            append_rollouts(self.out, self.step, [rollout_of(each) for each in best[: self.config.keep_rollouts]])
            self._length = append_line(self.out / "metrics.jsonl", row)
        return metrics

    def _round_folder(self) -> Path:
        assert self.out is not None
        return self.out / f"round-{self._round}"

    def _chunk_file(self, first: int) -> Path:
        return self._round_folder() / f"chunk-{first // self.config.instructions_per_step:05d}.json"

    def _chosen(self, instructions: Sequence[str]) -> tuple[Instruction, ...]:
        count = self.config.num_instructions
        given = [text if isinstance(text, Instruction) else Instruction(text) for text in instructions]
        budget = {"width": self._longest, "micro_batch_tokens": self.config.sft.micro_batch_tokens}
        kept = [given[number] for number in fitting(self.policy, given, who=self.label, **budget)]
        self.num_left_out = len(given) - len(kept)
        if not kept or (count or 0) > len(kept):
            expected = f"num_instructions={count}" if count else "1 or more"
            raise ValueError(f"Expert iteration: expected {expected} instructions, got {len(kept)}.")
        if count is None:
            return tuple(kept)
        order = keyed_rng(self.seed, "expert iteration instructions").permutation(len(kept))
        return tuple(kept[i] for i in order[:count].tolist())

    def _settings(self) -> dict[str, Any]:
        """All that decides the run apart from the policy, flat and JSON-able."""
        left_out = {shared.name for shared in fields(TrainingConfig)} | FREE | {"sft"}
        settings = {name: value for name, value in asdict(self.config).items() if name not in left_out}
        trained = {
            f"sft.{name}": value for name, value in asdict(self.config.sft).items() if name not in FREE_TO_CHANGE
        }
        texts = json.dumps([(instruction.instruction, instruction.input) for instruction in self.instructions])
        return {
            **settings,
            **trained,
            "max_response_tokens": self._longest,
            "num_instructions": len(self.instructions),
            "instructions_sha256": hashlib.sha256(texts.encode()).hexdigest(),
            "oracle": self.oracle.name,
            "seed": self.seed,
            "num_processes": self._processes.count,
            "left_out": self.num_left_out,
        }


def rollout_of(best: Mapping[str, Any]) -> dict[str, Any]:
    """A best response as rollouts.jsonl.gz holds it."""
    instruction = str(Instruction(best["instruction"], best["input"]))
    told = {"response": best["response"], "score": best["reward"], "finished": best["finished"]}
    return {"instruction": instruction, **told, "info": {"mean_reward": best["mean_reward"]}}


def round_seed(seed: int, number: int, purpose: str) -> int:
    """The seed of a round's sampling or fine-tuning, so that rounds draw independently."""
    return int(keyed_rng(seed, "expert iteration", purpose, number).integers(2**62))
