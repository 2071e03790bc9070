"""Experience from an environment, and minibatch updates on it: shared by the agents that sample."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import chain
from operator import itemgetter
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList
from numpy.typing import NDArray
from torch import Tensor

from ..envs.scoring import Scoring
from ..errors import UnscoredError
from ..oracles.base import checked
from ..seeding import keyed_rng
from .language_model import LanguageModel
from .loop import Loop, Sums, keyed_generator
from .losses import kl_estimate, masked_moments
from .policy_agent import PolicyAgent, PolicyConfig, fitting
from .processes import Processes, judge_together
from .prompts import prompt_lengths
from .rollouts import Groups, Rollouts, length_mask, pad_rows
from .settings import Count, Natural, Positive

Round = tuple[Rollouts, Tensor, dict[str, Tensor]]
"""Responses, their rewards (NaN: unscored) and what the environment reports of each."""


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(PolicyConfig):
    """Settings that PPO and Quark share; the defaults are AlpacaFarm's for LLaMA 7B."""

    total_steps: Count = 390
    """Steps (AlpacaFarm: 10 passes over 20k instructions; its best checkpoints of PPO are those of steps 20 to 80)."""
    rollout_batch_size: Count = 512
    """Responses in a step, all processes together; a multiple of the environments' number."""
    minibatch_size: Count = 256
    """Most responses in an update, all processes together."""
    num_epochs: Count = 2
    """Passes over the responses that a step trains on."""
    temperature: Positive = 1.0
    """Temperature of sampling, and of every log-probability."""
    max_response_tokens: Count | None = None
    """Longest response; None: the policy's own limit (AlpacaFarm: 300)."""
    sampling_batch_size: Count | None = None
    """Most responses sampled at once: memory and speed only, results differ by rounding. None: 256 on a CPU, what fits
    into the free memory on a GPU (set a number there for runs that are to be repeated in every bit)."""
    keep_rollouts: Natural = 64
    """Responses of a step, the first, that are kept in the run's rollouts.jsonl.gz; 0: none."""
    adam_eps: float = 1e-5


class Collector:
    """Samples responses to an environment's instructions and lets it score them.

    All draws are keyed on (seed, step), and rows are numbered over the whole step: its instructions and responses are
    the same however they are dealt out to processes and rounds of the environment, and so are those of a resumed run.
    Instructions whose prompts are too long for the policy are not drawn for it, with a warning by `who`.

    Args:
        env: A vector environment of instructions with `autoreset_mode=AutoresetMode.DISABLED`; each process has its
            own.
        num_generations: Responses to one instruction, in consecutive rows; a divisor of the environment's size.

    Attributes:
        num_left_out: Instructions that are too long.
        width: Most tokens of a response.

    Raises:
        ValueError: The environment resets by itself, or its size does not divide the batch.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        policy: LanguageModel,
        config: OnlineConfig,
        *,
        who: str,
        num_generations: int = 1,
    ) -> None:
        mode, processes = env.metadata.get("autoreset_mode"), Processes(policy.device)
        if mode != AutoresetMode.DISABLED:
            raise ValueError(
                f"Agents reset the environment themselves: expected AutoresetMode.DISABLED, got {mode!r}. "
                'Make it by gym.make_vec(id, num_envs=..., autoreset_mode="Disabled").'
            )
        layer: Any = env
        while isinstance(layer, VectorWrapper):
            if isinstance(layer, DictInfoToList):
                raise ValueError("Agents read infos as arrays: leave out the wrapper DictInfoToList.")
            layer = layer.env
        at_once = env.num_envs * processes.count
        if config.rollout_batch_size % at_once:
            raise ValueError(
                f"The rollout batch must be a multiple of num_envs x processes = {at_once}, got "
                f"{config.rollout_batch_size!r}. Change rollout_batch_size or num_envs."
            )
        self._env: Any = env
        self._policy, self._config, self._described = policy, config, describe(env)
        if env.num_envs % num_generations:
            raise ValueError(
                f"num_generations must be a divisor of the number of environments, {env.num_envs}, got "
                f"{num_generations!r}: the responses to an instruction are sampled together."
            )
        options = {"options": {"num_generations": num_generations}}
        self._grouped: dict[str, Any] = options if num_generations > 1 else {}
        self._num_rounds = config.rollout_batch_size // at_once
        self._most_rows = math.ceil(config.minibatch_size / processes.count)
        self.width = config.max_response_tokens or policy.max_response_tokens
        budget = config.micro_batch_tokens
        self._left_out, self._longest_prompt = readable(
            env, policy, who=who, width=self.width, micro_batch_tokens=budget
        )
        self.num_left_out = len(self._left_out)

    def describe(self) -> dict[str, Any]:
        """All that decides a run beside its config, JSON-able, for a resumed run to compare."""
        return self._described

    def collect(self, loop: Loop, step: int) -> tuple[Rollouts, Tensor, NDArray[np.int64], dict[str, float]]:
        """This process's responses of a step; there may be none that has a score, if another process has one.

        Returns:
            Those that have a score; their scores, float64 [B]; their numbers among the step's rows, ascending [B]; and
            the metrics score/*, tokens, tokens/mean, finished and info/* of `PPO.updates`, over all processes.

        Raises:
            UnscoredError: No response of any process has a score.
        """
        first = int(keyed_rng(loop.seed, "instructions", step).integers(2**62))
        processes, size = loop.processes, self._env.num_envs
        # A row of random numbers a response, drawn for the whole step by every process: so what is drawn for a response
        # depends neither on the number of processes nor on how many are sampled at once.
        generator = keyed_generator(loop.seed, "sample", step, 0)
        uniforms = torch.rand(self._config.rollout_batch_size, self.width, generator=generator)
        begins = [(turn * processes.count + processes.rank) * size for turn in range(self._num_rounds)]
        rounds = [self._round(loop, first + begin, uniforms[begin : begin + size]) for begin in begins]
        rewards = torch.cat([reward for _, reward, _ in rounds])
        scored = ~rewards.isnan()
        rows = np.concatenate([np.arange(begin, begin + size) for begin in begins])
        # Added up first, so that all processes raise together instead of waiting for one that is gone.
        num_tokens = sum(int(responses.lengths.sum()) for responses, _, _ in rounds)
        counts = processes.add_up({"scored": int(scored.sum()), "all": len(rewards), "tokens": num_tokens})
        if not counts["scored"]:
            raise UnscoredError(f"Step {step}: none of {counts['all']:.0f} responses has a score to learn from.")
        rollouts = Rollouts.cat([responses for responses, _, _ in rounds])[scored.to(self._policy.device)]
        infos = [info for _, _, info in rounds]
        loop.rollouts = [] if loop.out is None else self._kept(loop, begins, rounds)
        metrics = processes.means(
            {
                "score/mean": rewards,
                "score/unscored": rewards.isnan(),
                "tokens/mean": rollouts.lengths,
                "finished": rollouts.finished,
                **{name: torch.cat([i[name] for i in infos if name in i]) for name in chain.from_iterable(infos)},
            }
        )
        metrics["tokens"] = counts["tokens"]
        metrics["score/std"] = float(masked_moments(rewards, scored, reduce=processes.reduce)[1].sqrt())
        return rollouts, rewards[scored].to(self._policy.device), rows[scored.numpy()], metrics

    def _kept(self, loop: Loop, begins: Sequence[int], rounds: Sequence[Round]) -> list[dict[str, Any]]:
        """The first responses of a step as rollouts.jsonl.gz holds them, by their numbers; of all processes."""
        own: list[tuple[int, dict[str, Any]]] = []
        for begin, (responses, rewards, info) in zip(begins, rounds, strict=True):
            for row in range(min(len(responses), max(0, self._config.keep_rollouts - begin))):
                texts = {"instruction": str(responses.instructions[row]), "response": responses.texts[row]}
                numbers = {"score": float(rewards[row]), "tokens": int(responses.lengths[row])}
                told = {name.removeprefix("info/"): float(column[row]) for name, column in info.items()}
                ended = {"finished": bool(responses.finished[row]), "info": told}
                own.append((begin + row, {**texts, **numbers, **ended}))
        gathered = chain.from_iterable(loop.processes.gather(own))
        return [row for _, row in sorted(gathered, key=itemgetter(0))]

    def _round(self, loop: Loop, seed: int, uniforms: Tensor) -> Round:
        """One pass through the environment: responses, rewards (NaN: unscored) and what the environment reports."""
        # Slot i draws from seed + i, so the slots of all rounds and processes count on from one number.
        base = self._env.unwrapped
        with base.leaving_out(self._left_out) if self._left_out else nullcontext():
            instructions, _ = self._env.reset(seed=seed, **self._grouped)
        with loop.timed("sample"):
            responses = self._policy.generate(
                instructions,
                generator=uniforms,
                temperature=self._config.temperature,
                max_new_tokens=self.width,
                batch_size=self._config.sampling_batch_size,
            )
        together = partial(judge_together, loop.processes)
        asking = base.asking_by(together) if isinstance(base, Scoring) else nullcontext()
        with loop.timed("score"), asking:
            _, rewards, _, _, info = loop.processes.together(lambda: self._env.step(responses.texts))
        given = checked("The environment's step (with its wrappers)", rewards, len(responses.texts))
        scores = np.where(info.get("scored", True), given, math.nan)
        return responses, torch.from_numpy(scores), _float_columns(info)

    def longest_rollouts(self) -> Rollouts:
        """As many rows as an update of this process may have, as long as they may be, and a short one."""
        any_token, num_rows = [self._policy.eos_token_ids[0]], self._most_rows + 1
        prompts = [*([any_token * self._longest_prompt] * self._most_rows), any_token]
        responses = [*([any_token * self.width] * self._most_rows), any_token]
        texts, finished = [""] * num_rows, [True] * num_rows
        return Rollouts.given(texts, texts, prompts, responses, finished, self._policy.device)


def columns(
    loop: Loop, rollouts: Rollouts, compute: Callable[[Rollouts], Tensor], groups: Groups | None = None
) -> Tensor:
    """`compute` of each response token, [B, T], in micro-batches; by `groups` if it shares prompts."""
    device = rollouts.lengths.device
    table = torch.zeros(length_mask(rollouts.lengths).shape, device=device)
    for rows in loop.cut(rollouts.total_lengths, groups):
        part = rollouts[rows.to(device)]
        with loop.processes.autocast():
            table[rows.to(device)] = pad_rows(compute(part), part.lengths, width=table.shape[1])
    return table


class CollectingAgent(PolicyAgent):
    """What agents that learn from their own samples share."""

    config: OnlineConfig
    _collector: Collector

    def _collect_from(self, env: VectorEnv[Any, Any, Any], *, num_generations: int = 1, **run: Any) -> None:
        """Begins a run that samples from `env`; `run` are arguments of `_start`."""
        self._collector = Collector(env, self.policy, self.config, who=self.label, num_generations=num_generations)
        self.num_left_out = self._collector.num_left_out
        self.policy.add_reference()
        described = {"total": self.config.total_steps, "inputs": self._collector.describe, **run}
        self._loop = self._start(self.config, **described)

    def _sampled(
        self, rollouts: Rollouts, logprobs: Callable[[Rollouts], Tensor], groups: Groups | None = None
    ) -> Tensor:
        """Log π of the responses' tokens [B, T] as they were sampled, or by `logprobs` where that is not exact."""
        if self.policy.samples_exactly:
            return pad_rows(rollouts.logprobs, rollouts.lengths)
        return columns(self._loop, rollouts, logprobs, groups)


def drift(logprobs: Tensor, ref_logprobs: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Metrics of how far samples are from the reference and how varied they are, by the log-probabilities of tokens.

    These are [B, T], of which row i has `lengths[i]`. KL is in nats a response, entropy in nats a token.
    """
    kl = {f"kl/{kind}": kl_estimate(logprobs, ref_logprobs, kind).sum(1) for kind in ("k1", "k3")}
    return {**kl, "entropy": -logprobs[length_mask(lengths)]}


def update_in_epochs(
    loop: Loop,
    sizes: Tensor,
    sums: Sums,
    *,
    counts: Tensor | None = None,
    key: Sequence[int],
    numbers: NDArray[np.int64],
    trained: NDArray[np.int64],
    num_epochs: int,
    num_minibatches: int,
    group_size: int = 1,
    groups: Groups | None = None,
) -> dict[str, float]:
    """Epochs of minibatch updates on this process's rows by `sums` over some of them; their mean metrics.

    A row reads `sizes` [B] tokens and counts as `counts` [B] items in the means; None: as one. `numbers` [B],
    ascending, is what the rows are called among those of all processes, `trained` the numbers that all together train
    on; `key` decides, with the number of the epoch, the order of these. Each `group_size` successive numbers stay
    together in it, and so in a minibatch where sizes allow. `groups` are of the rows, if `sums` shares prompts.
    """
    device, sizes = sizes.device, sizes.cpu()
    items = torch.ones_like(sizes) if counts is None else counts.cpu()
    together = np.split(trained, np.flatnonzero(np.diff(trained // group_size)) + 1)
    updates = []
    for epoch in range(num_epochs):
        # The same order on all processes: a minibatch is one of all, of which each works on the rows it has.
        drawn = keyed_rng(loop.seed, "minibatches", key[0], epoch, *key[1:]).permutation(len(together))
        order = np.concatenate([together[place] for place in drawn])
        for rows in (places(numbers, part) for part in np.array_split(order, num_minibatches)):
            micro = [rows[part].to(device) for part in loop.cut(sizes[rows], groups and groups.of(rows))]
            updates.append(loop.update(micro, sums, count=int(items[rows].sum())))
    return {name: math.fsum(update[name] for update in updates) / len(updates) for name in updates[0]}


def readable(
    env: VectorEnv[Any, Any, Any], policy: LanguageModel, *, who: str, width: int, micro_batch_tokens: int | None
) -> tuple[frozenset[int], int]:
    """Which of an environment's instructions the policy cannot read, and the tokens of its longest prompt.

    The environment may have any wrappers. One whose instructions cannot be looked into leaves none out: a prompt that
    is too long is refused there when it is drawn. Arguments as of `fitting`.

    Returns:
        The positions of instructions that are too long, for `leaving_out`; the tokens, at most the policy's limit.
    """
    base: Any = env.unwrapped
    if not isinstance(base, Scoring):
        return frozenset(), policy.max_prompt_tokens
    texts = [base.instructions[position] for position in base.drawn]
    kept = set(fitting(policy, texts, who=who, width=width, micro_batch_tokens=micro_batch_tokens))
    longest = prompt_lengths(policy.tokenizer, policy.template, nlargest(64, texts, key=len))
    too_long = frozenset(position for number, position in enumerate(base.drawn) if number not in kept)
    return too_long, min(policy.max_prompt_tokens, max(longest))


def places(rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> Tensor:
    """Where the `numbers` that `rows`, ascending, holds stand in it, in the order of `numbers`: int64."""
    return torch.from_numpy(np.searchsorted(rows, numbers[np.isin(numbers, rows)]))


def describe(env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
    """All of an environment that decides a run, JSON-able, for a resumed run to compare."""
    layers = _layers(env)
    base = layers[-1]
    chosen = (base.spec.kwargs.get("oracle") if base.spec else None) or getattr(base, "oracle", None)
    return {
        "env": env.spec.id if env.spec else type(env.unwrapped).__name__,
        "num_envs": env.num_envs,
        "dataset": getattr(getattr(base, "dataset", None), "name", None),
        "split": getattr(base, "split", None),
        "oracle": _named(chosen),
        "wrappers": [
            f"{type(w).__name__}({_named(vars(w).get('oracle')) or ''})" for w in layers if w is not w.unwrapped
        ],
        **_drawn(base),
    }


def _drawn(base: Any) -> dict[str, Any]:
    """Which instructions may be drawn, if the user has left some out."""
    drawn = getattr(base, "drawn", ())
    if not drawn or len(drawn) == len(base.instructions):
        return {}
    return {"num_drawn": len(drawn), "drawn_sha256": hashlib.sha256(repr(list(drawn)).encode()).hexdigest()}


def _layers(env: Any) -> list[Any]:
    """The environment, what it wraps, and so on down to the one without wrappers; of separate ones the first."""
    layers = []
    while env is not None:
        layers.append(env)
        env = env.env if env is not env.unwrapped else next(iter(getattr(env, "envs", ())), None)
    return layers


def _named(spec: Any) -> Any:
    """An oracle's specification as JSON holds it, objects replaced by their names."""

    def name(each: Any) -> str:
        return str(each) if isinstance(each, PurePath) else str(getattr(each, "name", type(each).__name__))

    return json.loads(json.dumps(spec, default=name))


def _float_columns(info: Mapping[str, Any], prefix: str = "info/") -> dict[str, Tensor]:
    """The floats that an environment reports of each response, and the responses' lengths; NaN for absent entries."""
    columns: dict[str, Tensor] = {}
    for key, values in info.items():
        if isinstance(values, Mapping):
            columns |= _float_columns(values, f"{prefix}{key}/")
        elif isinstance(values, np.ndarray) and (values.dtype.kind == "f" or key == "response_length"):
            present = info.get(f"_{key}", np.ones(len(values), dtype=bool))
            columns[prefix + key] = torch.from_numpy(np.where(present, values, math.nan).astype(np.float64))
    return columns
