"""Reward modeling: a score r(x, y) such that P(y preferred to y') = σ(r(x, y) − r(x, y')), fitted to preferences.

Source: Bradley and Terry 1952; Stiennon et al. 2020 (arXiv:2009.01325), eq. 1; numbers from AlpacaFarm (Dubois et al.
2023, arXiv:2305.14387), released code. Deviations from that code:

1. The head starts at N(0, 1/√(d + 1)) without bias (Stiennon et al.), not at torch's default: the first scores have
   variance of about 1.
2. The score is read at an end-of-sequence token, so the model sees whether a response ended (`end_with_eos`;
   AlpacaFarm's models read the last word). A conversation of a chat template is read whole in any case, with what the
   template writes after an answer, as other libraries read it. The choice travels with the model, as
   `alpacafarm_end_with_eos` in its config.json; so does `max_length`, as `alpacafarm_max_length`. The saved tokenizer
   ends every text so, for libraries that do not read the config.
3. Soft targets: P(the label is right) of each pair, e.g. 0.75 under 25 % flips.
4. A text that is too long loses its middle, as in `oracles.RewardModel`, instead of the response's end.
5. Calibration: mean and standard deviation of the scores of given texts can be stored with the weights, as
   `alpacafarm_reward_mean` and `alpacafarm_reward_std`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ..bases import is_adapter
from ..chat_templates import ChatTemplate, load_template
from ..errors import CheckpointError, warn_caller
from ..folders import check_model
from ..instructions import Preference
from ..last_layer import last_mlp_at, last_mlp_for_scores, pad_before_score
from ..oracles.reward_model import OWN_CONFIG, cut_middle, float32_head, new_scorer, num_positions
from ..pretrained import load_tokenizer, reading
from ..templates import PromptTemplate
from .adapters import merge, turn_off_dropout, with_adapter
from .attention import packs
from .checkpoints import fingerprint, load_weights
from .loop import Loop, Resume, Sums, epoch_batch, keyed_generator
from .losses import pairwise_loss
from .policy_agent import Trainer, merge_folder
from .processes import default_device
from .prompts import check_budget, check_eos, prompt_lengths, settle, up_to
from .rollouts import micro_batches, packed_inputs, ragged
from .saving import end_texts, save_files
from .settings import Count, Natural, NonNegative, Positive, Schedule, TrainingConfig

Texts = tuple[list[int], ...]
"""The tokens of a record's texts: of a preference the chosen and the rejected."""


@dataclass(frozen=True, kw_only=True)
class RewardModelingConfig(TrainingConfig):
    """Settings of reward modeling; the defaults are AlpacaFarm's for LLaMA 7B (10k pairs, one epoch)."""

    epochs: Count = 1
    """Passes over the preferences."""
    batch_size: Count = 16
    """Pairs in an update, all processes together."""
    learning_rate: Positive = 3e-6
    schedule: Schedule = "cosine"
    warmup_steps: NonNegative = 0.03
    max_length: Annotated[int, Field(ge=2)] = 512
    """Tokens of prompt and response; longer texts, or texts of more tokens than the model has positions, lose their
    middle, with a warning that counts them.
    """
    end_with_eos: bool = True
    """Whether texts end with the end-of-sequence token. AlpacaFarm's do not; those of a chat template always end as it
    ends them.
    """
    eval_every: Natural = 0
    """Steps between evaluations on the held-out preferences; 0 for the last step only."""

    @classmethod
    def paper(cls) -> Self:
        """AlpacaFarm's settings for LLaMA 7B."""
        return cls(end_with_eos=False)

    @classmethod
    def sandbox(cls) -> Self:
        """Settings for the sandbox's small model on two CPU cores."""
        return cls(
            epochs=2,
            batch_size=32,
            learning_rate=1e-3,
            schedule="linear",
            weight_decay=0.01,
            precision="float32",
            micro_batch_tokens=1024,
            save_every=200,
        )


def scale_of(scores: NDArray[np.float64], num_samples: int) -> tuple[float, float]:
    """Mean and standard deviation of scores [B]; that within groups of `num_samples` neighbours, if it is above 1."""
    if num_samples == 1:
        return float(scores.mean()), float(scores.std())
    return float(scores.mean()), math.sqrt(scores.reshape(-1, num_samples).var(axis=1, ddof=1).mean())


class RewardModeling(Trainer):
    """Fits a reward model to preferences; a step is one update. Other arguments as of `PolicyAgent`.

    Args:
        init: Folder or hub name of the model to start from, usually the SFT policy; a sequence-classification folder
            keeps its head.
        preferences: Settled comparisons. Those whose prompts alone reach `max_length` are left out, with a warning.
        targets: P(the label is right) of each preference, in [0, 1]; None means 1.
        validation: Held-out preferences, evaluated while training.
        seed: Decides the head's start and the order of the pairs.
        template: "alpaca" or your own template instead of that in the folder of `init`.
        lora: Trains a fresh adapter and the head, over a frozen base. What is saved is the adapter's folder, which
            names the base, or a whole model (`save`). On a LoRA policy of that base the adapter takes next to no memory
            (`LanguageModel.reward_oracle`), and the value of PPO can start from it.
        dtype: That of the weights; head and adapter are float32, and so are the optimizer's masters of other weights.

    Raises:
        CheckpointError: `init` is no model, or is an adapter and `lora` is given.
    """

    label: ClassVar[str] = "Reward model"
    counted: ClassVar[str] = "preferences"
    """The records that it is trained on."""

    def __init__(
        self,
        init: str | Path,
        preferences: Sequence[Preference],
        *,
        targets: Sequence[float] | None = None,
        validation: Sequence[Preference] = (),
        config: RewardModelingConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        template: PromptTemplate | str | None = None,
        device: str | torch.device | None = None,
        lora: peft.LoraConfig | None = None,
        dtype: torch.dtype = torch.float32,
        resume: Resume = "auto",
    ) -> None:
        if not preferences:
            raise ValueError(f"{type(self).__name__} needs at least one of the {self.counted}, got none.")
        if targets is not None and len(targets) != len(preferences):
            raise ValueError(f"Expected a target for each of {len(preferences)} {self.counted}, got {len(targets)}.")
        self.config, self.seed, self.validation = config or RewardModelingConfig(), seed, validation
        check_model(init)
        if is_adapter(init) and lora is not None:
            raise CheckpointError(
                f"{init}: expected a whole model to start an adapter from, got an adapter. Merge it into one first: "
                "alpacafarm merge FOLDER OUT."
            )
        self.tokenizer: Any = load_tokenizer(init)
        with reading(init, "a language model's tokenizer"):
            check_eos(self.tokenizer)
        self.template = load_template(init, self.tokenizer, template)
        chat = isinstance(self.template, ChatTemplate)
        self._ends = chat or self.config.end_with_eos
        end_texts(self.tokenizer, None if chat else self._ends)
        self.model = _scoring_model(init, seed, dtype).to(device or default_device())
        settle(self.model, self.tokenizer, self.template)  # a score is read at the last token that is no pad
        self.lora = None if lora is None else replace(lora, task_type="SEQ_CLS")  # which trains the head too
        if self.lora is not None:
            self.model = turn_off_dropout(with_adapter(self.model, self.lora, seed=seed))
        self.model.config.alpacafarm_end_with_eos = self._ends
        self.model.config.alpacafarm_max_length = self.config.max_length
        kept = self._fitting(preferences)
        self.num_left_out = len(preferences) - len(kept)
        self._targets = None if targets is None else torch.tensor(targets, dtype=torch.float32)[kept]
        self._pairs = self._texts([preferences[number] for number in kept])
        check_budget(self.config.micro_batch_tokens, max(self._sizes(self._pairs)), who=self.label)
        self._loop = Loop(
            {"reward": self.model},
            config=self.config,
            total=self.config.epochs * math.ceil(len(kept) / self.config.batch_size),
            seed=seed,
            out=None if out is None else Path(out),
            inputs=self._inputs(),
            write=lambda folder: self.save(folder / "reward"),
            read=lambda folder: self.load(folder / "reward"),
            largest=self._largest,
            label=self.label,
            resume=resume,
        )

    def updates(self) -> Iterator[dict[str, float]]:
        """Train, one update at a time.

        Yields:
            step, loss (nats a pair), accuracy and margin on the batch before its update, grad_norm, learning_rate; and
                eval/loss, eval/accuracy, eval/margin when the held-out preferences were evaluated.
        """
        for step in self._loop:
            size = self.config.batch_size
            batch = self._loop.processes.share(
                epoch_batch(step, num_items=len(self._pairs), batch_size=size, seed=self.seed)
            )
            pairs = [self._pairs[row] for row in batch.tolist()]
            targets = None if self._targets is None else self._targets[batch]
            metrics = self._loop.update(self._cut(pairs), self._sums_of(pairs, targets), count=len(pairs))
            is_due = step == self._loop.total or (self.config.eval_every and step % self.config.eval_every == 0)
            if self.validation and is_due:
                metrics |= {f"eval/{name}": value for name, value in self.evaluate(self.validation).items()}
            yield self._loop.log(metrics)

    @torch.no_grad()
    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        """Raw (uncalibrated) scores [B] of responses."""
        texts = self._encode(instructions, responses)
        scores = torch.zeros(len(texts), dtype=torch.float64)
        for rows in self._cut([(text,) for text in texts]):
            scores[rows] = self._forward([texts[row] for row in rows.tolist()]).double().cpu()
        return scores.numpy()

    @torch.no_grad()
    def evaluate(self, preferences: Sequence[Preference]) -> dict[str, float]:
        """Mean loss (nats), accuracy (share of pairs with the chosen response scored higher, ties half) and margin."""
        pairs = self._encode_pairs(preferences)
        totals = {"loss": 0.0, "accuracy": 0.0, "margin": 0.0}
        for rows in self._cut(pairs):
            for name, part in self._sums([pairs[row] for row in rows.tolist()]).items():
                totals[name] += float(part)
        return {name: total / len(pairs) for name, total in totals.items()}

    def calibrate(
        self, instructions: Sequence[str], responses: Sequence[str], *, num_samples: int = 1
    ) -> tuple[float, float]:
        """Store mean and standard deviation of these responses' scores in the model's config; returns them.

        An oracle then gives (score − mean) / std: 0 is an average response of, say, the SFT policy, and one KL
        coefficient suits all reward models. With `num_samples` above 1, as many consecutive responses answer one
        instruction, and the standard deviation is that among them: what a policy can move. Source: Stiennon et al.
        2020, appendix C (mean 0).

        Raises:
            ValueError: The scores have no spread, or the responses are no multiple of num_samples.
        """
        scores = self.score(instructions, responses)
        mean, std = scale_of(scores, num_samples) if len(scores) else (math.nan, 0.0)
        if not std > 0:
            raise ValueError(
                f"Expected at least two responses{' to one instruction' * (num_samples > 1)} that differ in score, got "
                f"{len(scores)} with std {std!r}."
            )
        self.model.config.alpacafarm_reward_mean, self.model.config.alpacafarm_reward_std = mean, std
        return mean, std

    def save(self, folder: str | Path, *, merged: bool = False) -> None:
        """Write a Hugging Face sequence-classification folder (one label) with tokenizer, template and model card.

        Of a model with LoRA that is peft's folder of the adapter and the head, with alpacafarm_reward.json beside;
        `merged`, a whole model.
        """
        model, extra = self.model, {}
        if self.lora is not None and merged:
            model = merge(model)
        elif self.lora is not None:
            config = model.config.to_dict()
            extra[OWN_CONFIG] = {key: config[key] for key in config if key.startswith("alpacafarm_")}
        save_files(folder, model, self.tokenizer, self.template, eos=self._ends, extra=extra, facts=self.facts)

    def load(self, folder: str | Path) -> None:
        """Read weights that `save` wrote back into the model."""
        load_weights(Path(folder), self.model)

    def _sums_of(self, pairs: Sequence[Texts], targets: Tensor | None) -> Sums:
        def sums(rows: Tensor) -> dict[str, Tensor]:
            given = [pairs[row] for row in rows.tolist()]
            return self._training_sums(given, None if targets is None else targets[rows.cpu()])

        return sums

    def _training_sums(self, rows: Sequence[Texts], targets: Tensor | None) -> dict[str, Tensor]:
        """Over the rows of a micro-batch, `loss` and what else is reported of a step."""
        return self._sums(rows, targets)

    def _sums(self, pairs: Sequence[Texts], targets: Tensor | None = None) -> dict[str, Tensor]:
        scores = self._forward([chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs])
        chosen, rejected = scores.view(2, len(pairs))
        losses = pairwise_loss(chosen, rejected, None if targets is None else targets.to(scores.device))
        right = (chosen > rejected).float() + (chosen == rejected).float() / 2
        return {"loss": losses.sum(), "accuracy": right.sum(), "margin": (chosen - rejected).sum()}

    def _forward(self, texts: Sequence[list[int]]) -> Tensor:
        """Scores [B] of tokenized texts; padded on the right, read at the last real token. Of none, a pass anyway."""
        given = list(texts) or [[self.tokenizer.eos_token_id]]
        if self._packs:
            bare: Any = self.model.get_base_model()
            tokens, lengths = ragged(given, self.model.device)
            ends = lengths.cumsum(0) - 1
            with last_mlp_at(bare, torch.isin(torch.arange(len(tokens)), ends)[None]):
                hidden = bare.base_model(**packed_inputs(tokens, lengths.tolist())).last_hidden_state
            return torch.as_tensor(bare.score(hidden[0, ends]))[: len(texts), 0].float()
        padded = self.tokenizer.pad({"input_ids": given}, padding_side="right", return_tensors="pt")
        # A mask would be kept for the backward pass in each layer, and keys repeated for each head that shares them.
        names = ["input_ids"] if pad_before_score(self.model) is not None else ["input_ids", "attention_mask"]
        inputs = {name: padded[name].to(self.model.device) for name in names}
        with last_mlp_for_scores(self.model, inputs["input_ids"]):
            logits = self.model(**inputs, use_cache=False).logits
        return torch.as_tensor(logits)[: len(texts), 0].float()

    def _largest(self) -> tuple[list[int], Sums]:
        sizes = torch.tensor(self._sizes(self._pairs))
        numbers = self._longest_rows(sizes, self.config.batch_size)
        targets = None if self._targets is None else self._targets[numbers]
        return sizes[numbers].tolist(), self._sums_of([self._pairs[row] for row in numbers.tolist()], targets)

    @property
    def _packs(self) -> bool:
        """Whether texts go through the model one behind the other, without pads."""
        return self.lora is not None and pad_before_score(self.model) is not None and packs(self.model)

    def _sizes(self, rows: Sequence[Texts]) -> list[int]:
        """Tokens of records in a micro-batch, with padding where there is any."""
        packed = self._packs
        return [sum(map(len, row)) if packed else len(row) * max(map(len, row)) for row in rows]

    def _cut(self, rows: Sequence[Texts]) -> list[Tensor]:
        return micro_batches(self._sizes(rows), self._loop.micro_batch_tokens, packed=self._packs)

    def _inputs(self) -> dict[str, Any]:
        tokens, lengths = ragged([text for pair in self._pairs for text in pair])
        targets = torch.ones(len(self._pairs)) if self._targets is None else self._targets
        columns = {"tokens": tokens, "lengths": lengths, "targets": targets}
        inputs = {self.counted: len(self._pairs), "tokens": len(tokens), "data_sha256": fingerprint(columns.items())}
        inputs |= {"dtype": str(next(self.model.parameters()).dtype), "left_out": self.num_left_out}
        if self.lora is not None:
            layers: Any = self.lora.target_modules  # a set, by then, of what was given as a list
            named = sorted(layers) if isinstance(layers, set) else layers
            inputs["lora"] = {"r": self.lora.r, "alpha": self.lora.lora_alpha, "layers": named}
        return inputs

    def _fitting(self, preferences: Sequence[Preference]) -> list[int]:
        """The numbers of the preferences whose prompts leave room for a response."""
        instructions = [preference.instruction for preference in preferences]
        lengths = prompt_lengths(self.tokenizer, self.template, instructions)
        return up_to(self._limit - 1, lengths, who=self.label, advice="raise max_length")

    @property
    def _limit(self) -> int:
        """Most tokens of a text."""
        return int(min(self.config.max_length, num_positions(self.model.config)))

    def _texts(self, preferences: Sequence[Any]) -> list[Texts]:
        """The tokens of each record's texts."""
        return self._encode_pairs(preferences)

    def _encode_pairs(self, preferences: Sequence[Preference]) -> list[Texts]:
        instructions = [preference.instruction for preference in preferences]
        chosen = self._encode(instructions, [preference.chosen for preference in preferences])
        rejected = self._encode(instructions, [preference.rejected for preference in preferences])
        return list(zip(chosen, rejected, strict=True))

    def _encode(self, instructions: Sequence[str], responses: Sequence[str]) -> list[list[int]]:
        """Tokens of prompt, response and, if so configured, the end of sequence: what `oracles.RewardModel` reads."""
        rows = self.template.encode_pairs(self.tokenizer, instructions, responses, eos=self._ends)
        limit = self._limit
        if num_cut := sum(len(row) > limit for row in rows):
            warn_caller(f"{num_cut} of {len(rows)} texts lose their middle to the limit of {limit} tokens.")
        return [cut_middle(row, limit) for row in rows]


def _scoring_model(init: str | Path, seed: int, dtype: torch.dtype) -> Any:
    """A sequence-classification model with one label; a head that the folder lacks starts at N(0, 1/√(d + 1))."""
    if is_adapter(init):
        with TemporaryDirectory() as whole:
            merge_folder(init, whole)
            model = _scoring_model(whole, seed, dtype)
        model.name_or_path = str(init)
        return model
    model, is_new = new_scorer(init, dtype=dtype)
    float32_head(model)
    if is_new:
        width = model.score.weight.shape[1]
        generator = keyed_generator(seed, "reward head")
        with torch.no_grad():
            model.score.weight.normal_(0, 1 / math.sqrt(width + 1), generator=generator)
    return turn_off_dropout(model)
