"""Supervised fine-tuning (SFT): maximise log π(response, EOS | prompt) of demonstrations, or of labelled pairs.

Source: Ouyang et al. 2022 (arXiv:2203.02155), sec. 3.5; numbers from AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387),
released code. Deviations from that code:

1. The loss is a sum over response tokens divided by their number in the whole batch. AlpacaFarm averages per
   micro-batch, where a short response weighs more next to other short ones.
2. A demonstration whose prompt is longer than the policy's limit is left out, a response is cut to the policy's limit,
   both with a warning; AlpacaFarm cuts both together at 512 tokens.
3. The last, smaller batch of an epoch is trained on too.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor

from ..errors import warn_caller
from ..instructions import RATINGS, Demonstration, Preference, Rating
from .checkpoints import fingerprint
from .language_model import LanguageModel
from .loop import Resume, Sums, epoch_batch, keyed_generator
from .losses import nll_loss
from .policy_agent import PolicyAgent, PolicyConfig, Run, loaded
from .prompts import check_budget, conditioned, unconditioned
from .rollouts import Rollouts, ragged
from .settings import Count, NonNegative, Positive, Schedule


@dataclass(frozen=True, kw_only=True)
class SFTConfig(PolicyConfig):
    """Settings of SFT; the defaults are AlpacaFarm's for LLaMA 7B (10k demonstrations, about 234 updates)."""

    epochs: Count = 3
    """Passes over the demonstrations."""
    batch_size: Count = 128
    """Demonstrations in an update, all processes together."""
    learning_rate: Positive = 2e-5
    schedule: Schedule = "cosine"
    warmup_steps: NonNegative = 0.03

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small model, trained from scratch on two CPU cores."""
        return cls(
            epochs=9,
            batch_size=32,
            learning_rate=3e-3,
            schedule="linear",
            weight_decay=0.01,
            precision="float32",
            micro_batch_tokens=1024,
            save_every=500,
        )


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig(SFTConfig):
    """Settings of SFT that goes on from an SFT policy; AlpacaFarm's are those of SFT itself."""

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small policy on two CPU cores; twice PPO's learning rate, as in the paper."""
        return replace(super().sandbox(), epochs=3, learning_rate=4e-4, weight_decay=0.0, save_every=100)


@dataclass(frozen=True, kw_only=True)
class BinaryFeedMEConfig(FineTuningConfig):
    """Settings of Binary FeedME, those of SFT; `batch_size` counts pairs, of which only the chosen half is read."""


POSITIVE, NEGATIVE = "<reward_0>", "<reward_1>"
"""How the control tokens are spelled: in front of chosen, and of rejected, responses."""


@dataclass(frozen=True, kw_only=True)
class RewardConditioningConfig(FineTuningConfig):
    """Settings of binary reward conditioning, those of SFT; `batch_size` counts responses, two of which make a pair."""


class SFT(PolicyAgent):
    """Fine-tunes a policy on demonstrations; a step is one update. Other arguments as of `PolicyAgent`.

    Args:
        demonstrations: What to imitate; at least one.
        seed: Decides the order of the demonstrations.

    Raises:
        ValueError: There is no demonstration, or all prompts are too long.
    """

    label: ClassVar[str] = "SFT"

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        demonstrations: Sequence[Demonstration],
        *,
        config: SFTConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        self.config = config or SFTConfig()
        super().__init__(policy, self.config, seed=seed)
        kept = self._fitting(demonstrations)
        self._data = self._training_data(self._teacher_forced(kept))
        check_budget(self.config.micro_batch_tokens, int(self._data.total_lengths.max()), who=self.label)
        self._loop = self._start(
            self.config,
            total=self.config.epochs * math.ceil(len(kept) / self.config.batch_size),
            inputs=lambda: data_identity("demonstrations", self._data),
            out=out,
            resume=resume,
        )

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one update at a time; yields step, loss (nats a token), grad_norm, learning_rate."""
        for step in self._loop:
            batch = epoch_batch(step, num_items=len(self._data), batch_size=self.config.batch_size, seed=self.seed)
            data = self._data[self._loop.processes.share(batch)]
            means = self._loop.update(self._cut(data), partial(self._sums, data), count=len(data.tokens))
            yield self._loop.log(means)

    @torch.no_grad()
    def evaluate(self, demonstrations: Sequence[Demonstration]) -> float:
        """Mean negative log-likelihood of the demonstrations' response tokens, in nats; 0 or more."""
        data = self._teacher_forced(demonstrations)
        losses = [self._sums(data, rows)["loss"] for rows in self._cut(data)]
        return float(torch.stack(losses).sum()) / len(data.tokens)

    def _sums(self, data: Rollouts, rows: Tensor) -> dict[str, Tensor]:
        return {"loss": nll_loss(self.policy.logprobs(data[rows])).sum()}

    def _largest(self) -> tuple[list[int], Sums]:
        data = self._data[self._longest_rows(self._data.total_lengths, self.config.batch_size)]
        return data.total_lengths.tolist(), partial(self._sums, data)

    def _cut(self, data: Rollouts) -> list[Tensor]:
        return self._loop.cut(data.total_lengths)

    def _training_data(self, data: Rollouts) -> Rollouts:
        """The data to train on, made of the demonstrations before the loop starts; for subclasses to change."""
        return data

    def _teacher_forced(self, demonstrations: Sequence[Demonstration]) -> Rollouts:
        instructions = [each.instruction for each in demonstrations]
        return teacher_forced(self.policy, instructions, [each.response for each in demonstrations])


class BinaryFeedME(SFT):
    """SFT on the chosen response of every pair.

    Source: AlpacaFarm, sec. 4, after OpenAI's FeedME, which trains on the responses that people rated best; here the
    rating is binary. AlpacaFarm released weights of it, neither training code nor settings: those of its SFT are used.

    Args:
        preferences: Settled comparisons, at least one; the rejected responses are not used.
    """

    label: ClassVar[str] = "Binary FeedME"

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        preferences: Sequence[Preference],
        *,
        config: BinaryFeedMEConfig | None = None,
        **run: Unpack[Run],
    ) -> None:
        chosen = [Demonstration(preference.instruction, preference.chosen) for preference in preferences]
        super().__init__(policy, chosen, config=config or BinaryFeedMEConfig(), **run)


class FeedME(SFT):
    """SFT on the responses that were rated best: 7 of 7.

    Source: OpenAI, "Model index for researchers" (2022), after which AlpacaFarm's `BinaryFeedME` is named; settings are
    those of SFT.

    Args:
        ratings: Rated responses; those below 7 are not used, and one that is rated so twice counts twice.

    Raises:
        ValueError: No response is rated 7.
    """

    label: ClassVar[str] = "FeedME"

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        ratings: Sequence[Rating],
        *,
        config: SFTConfig | None = None,
        **run: Unpack[Run],
    ) -> None:
        best = [Demonstration(each.instruction, each.response) for each in ratings if each.rating == RATINGS[-1]]
        if not best:
            raise ValueError(f"FeedME needs at least one rating of {RATINGS[-1]}, got none among {len(ratings)}.")
        super().__init__(policy, best, config=config, **run)


class BinaryRewardConditioning(SFT):
    """SFT on both responses of every pair, each after a control token that says which it is.

    Source: AlpacaFarm, sec. 4, after Keskar et al. 2019 (arXiv:1909.05858) and Korbak et al. 2023 (arXiv:2302.08582).
    Settings are as for `BinaryFeedME`; the tokens are `<reward_0>` (chosen) and `<reward_1>` (rejected), as in
    AlpacaFarm's Quark, where 0 is best. The policy gets them, with embeddings that the seed jitters, unless it has
    them from an earlier run; `act` and `evaluate` use the first.

    Args:
        preferences: Settled comparisons; at least one.

    Raises:
        ValueError: There is no preference, all prompts are too long, or the policy has other control tokens.
    """

    label: ClassVar[str] = "Reward conditioning"

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        preferences: Sequence[Preference],
        *,
        config: RewardConditioningConfig | None = None,
        **run: Unpack[Run],
    ) -> None:
        chosen = [Demonstration(preference.instruction, preference.chosen) for preference in preferences]
        rejected = [Demonstration(preference.instruction, preference.rejected) for preference in preferences]
        config = config or RewardConditioningConfig()
        policy = loaded(policy)
        # Before the prompts are measured: they get one position less.
        generator = keyed_generator(run.get("seed", 0), "control tokens")
        self._tokens = policy.add_control_tokens((POSITIVE, NEGATIVE), generator)
        super().__init__(policy, chosen + rejected, config=config, **run)

    def _training_data(self, data: Rollouts) -> Rollouts:
        bare = unconditioned(data, self._tokens)  # the prompts of a conditioned policy begin with the positive token
        tokens = [token for token in self._tokens for _ in range(len(data) // 2)]
        return conditioned(bare, tokens, bos=self.policy.tokenizer.bos_token_id)


class Imitation(SFT):
    """SFT on a policy's own responses, each of which ends if and only if it ended when it was sampled.

    Reading a text back need not give the tokens that it was made of, so their number does not say whether it was cut
    off. One that was is cut at `longest` tokens, the limit of sampling, once more; one that ended by itself is kept
    whole. Left out are responses that were cut off before any text.
    """

    def __init__(
        self,
        policy: LanguageModel,
        demonstrations: Sequence[Demonstration],
        finished: Sequence[bool],
        *,
        longest: int,
        config: SFTConfig,
        seed: int,
        out: Path | None,
    ) -> None:
        encoded = policy.encode_responses([each.response for each in demonstrations], eos=False)
        end = [policy.template.end_id(policy.tokenizer)]
        kept = [row for row, tokens in enumerate(encoded) if tokens or finished[row]]
        self._imitated = [encoded[row] + end if finished[row] else encoded[row][:longest] for row in kept]
        self._finished = [finished[row] for row in kept]
        with warnings.catch_warnings():
            # What SFT would cut is replaced here, and `finished` counts what sampling has cut.
            warnings.filterwarnings("ignore", message=r"\d+ of \d+ responses are cut to max_response_tokens")
            super().__init__(policy, [demonstrations[row] for row in kept], config=config, seed=seed, out=out)

    def _training_data(self, data: Rollouts) -> Rollouts:
        tokens, lengths = ragged(self._imitated, data.tokens.device)
        finished = torch.tensor(self._finished, device=tokens.device)
        logprobs = torch.zeros(len(tokens), device=tokens.device)
        return replace(data, tokens=tokens, lengths=lengths, logprobs=logprobs, finished=finished)


def teacher_forced(policy: LanguageModel, instructions: Sequence[str], responses: Sequence[str]) -> Rollouts:
    """Given responses as the policy reads them; a warning counts those that are cut."""
    data = policy.as_rollouts(instructions, responses)
    if num_cut := len(data) - int(data.finished.sum()):
        limit = policy.max_response_tokens
        warn_caller(
            f"{num_cut} of {len(data)} responses are cut to max_response_tokens={limit}. To keep them whole, load the "
            "policy with more: max_response_tokens= of LanguageModel.from_pretrained, --max-response-tokens of commands"
        )
    return data


def data_identity(name: str, data: Rollouts) -> dict[str, Any]:
    """How many rows (as `name`), how many response tokens and which: what resumed runs and processes compare."""
    columns = ("prompt_tokens", "prompt_lengths", "tokens", "lengths")
    digest = fingerprint((column, getattr(data, column)) for column in columns)
    return {name: len(data), "tokens": len(data.tokens), "data_sha256": digest}
