"""A language model as the agents see it: instructions in, `Rollouts` and log-probabilities out.

It plays roles: `"policy"` is the model being trained, `"reference"` the one it started from (a frozen copy, or the same
trunk with a frozen copy of its LoRA adapters). Dropout is always off, so that a token's log-probability is one number.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import peft
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bases import adapter_task, base_of, is_adapter
from ..chat_templates import load_template
from ..errors import CheckpointError
from ..folders import check_model
from ..oracles.base import NoCopy
from ..oracles.reward_model import RewardModel, num_positions, tokens_at_once
from ..pretrained import load_adapter, load_model, load_tokenizer, reading
from ..templates import PromptTemplate
from .adapters import (
    merge,
    merging_pays,
    reward_oracle,
    sampling_weights,
    trunk_of,
    turn_off_dropout,
    with_adapter,
    with_tokens,
)
from .memory import sampling_rows
from .precision import Precision
from .prompts import (
    adapter_files,
    check_eos,
    check_positions,
    control_tokens,
    encode_prompts,
    end_ids,
    extend,
    final_logits,
    insert,
    own_control_token,
    read_adapter_files,
    settle,
    settle_limits,
)
from .rollouts import Rollouts, ragged, ragged_split, unpad
from .sampling import draw_uniforms, sample
from .saving import save_files
from .served_sampler import ServedSampler
from .shared_prompts import scoring_pass
from .states import pooled_states
from .token_logprobs import without_logits

ROLES = ("policy", "reference")
MERGED_FROM = 32
"""Tokens of a response from which on merging adapters costs a CPU less than it saves."""


class LanguageModel(NoCopy):
    """A causal language model, or a `PeftModel` of one, with its tokenizer and prompt template.

    `copy.deepcopy` copies no weights, and what it gives refuses to be used: for a copy, save it and load the folder.

    Args:
        model: Its dropout is set to 0, for good.
        tokenizer: Needs an end-of-sequence token. A padding token that it lacks, or that ends responses, is chosen.
        template: How an instruction becomes a prompt.
        max_prompt_tokens: Longest prompt accepted. None: AlpacaFarm's 192, or what a response leaves of the positions.
        max_response_tokens: Longest response, sampled or trained on. None: the one it was saved with, else AlpacaFarm's
            300, or what the longest prompt leaves of the positions (64 for the sandbox's policy, which knows 256).

    Attributes:
        precision: What float32 weights sample and read `states` in. With "bfloat16" by a copy of them, much faster
            where the processor can; a sample's log-probabilities then differ from `logprobs` by rounding.

    Raises:
        ValueError: The tokenizer does not fit, or the limits do not fit the model's positions.
    """

    def __init__(
        self,
        model: PreTrainedModel | peft.PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        template: PromptTemplate,
        *,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
    ) -> None:
        self.model: Any = turn_off_dropout(model)
        self.tokenizer = tokenizer
        self.template = template
        settle(self._base_model, tokenizer, template)
        limits = max_prompt_tokens, max_response_tokens
        self.max_prompt_tokens, self.max_response_tokens = settle_limits(self._base_model, *limits)
        self.reference: PreTrainedModel | None = None
        self._reference_adapter: dict[str, Tensor] | None = None
        self._sampler: ServedSampler | None = None
        self.precision: Precision = "float32"
        num_embedded = cast(Tensor, self._base_model.get_input_embeddings().weight).shape[0]
        if len(tokenizer) > num_embedded:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens but the model embeds {num_embedded}; give the two that "
                "belong together, or call model.resize_token_embeddings(len(tokenizer))"
            )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        lora: peft.LoraConfig | None = None,
        seed: int = 0,
        template: PromptTemplate | str | None = None,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
        sampler: Mapping[str, Any] | None = None,
    ) -> Self:
        """Loads a model folder (or hub name) with its tokenizer and the prompt template it was trained on.

        `dtype` is that of the weights; log-probabilities are always float32. `lora` adds a fresh adapter, the only part
        that trains, which starts as the identity; `seed` is that of its random half. `template` is "alpaca" or your
        own; None: the folder's `prompt_template.json`, else the tokenizer's `chat_template`. `sampler`: that property.

        Raises:
            CheckpointError: The folder is missing, damaged or needs code of its own, or `lora` is given for an adapter.
            DataError: The folder has no template and none is given, or its template cannot be used.
        """
        check_model(path)
        tokenizer = load_tokenizer(path)
        with reading(path, "a language model's tokenizer"):
            check_eos(tokenizer)
        adapter = is_adapter(path)
        if adapter and adapter_task(path) == "SEQ_CLS":
            raise CheckpointError(f"{path}: expected a language model, found the adapter of a reward model.")
        if adapter and lora is not None:
            raise CheckpointError(f"{path} is a LoRA adapter already; load it without lora=, or `merge` it first")
        model, _ = load_model("AutoModelForCausalLM", base_of(path), dtype=dtype)
        if adapter:
            with reading(path, "a LoRA adapter"):
                read_adapter_files(model, Path(path), len(tokenizer))
                model = load_adapter(model, path, trains=True)
        elif lora is not None:
            model = with_adapter(model, lora, seed=seed)
        policy = cls(
            model.to(device),
            tokenizer,
            load_template(path, tokenizer, template),
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
        )
        policy.sampler = sampler
        return policy

    @property
    def sampler(self) -> ServedSampler | None:
        """Who samples: None for this process, or a vLLM server. Set it to settings of `ServedSamplerConfig` by name."""
        return self._sampler

    @sampler.setter
    def sampler(self, given: ServedSampler | Mapping[str, Any] | None) -> None:
        self._sampler = None if given is None else ServedSampler.of(given, self.model)

    @property
    def samples_exactly(self) -> bool:
        """Whether log-probabilities of samples are those of `logprobs`: a server's, or bfloat16's, are not."""
        return self._sampler is None and self.precision == "float32"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a response when sampling; the first is the one that ends it in training."""
        return end_ids(self._base_model, self.tokenizer, self.template)

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        return cast(torch.device, next(self.model.parameters()).device)

    def encode_prompts(self, instructions: Sequence[str]) -> list[list[int]]:
        """Returns each instruction's prompt as token ids, BOS in front if the tokenizer puts it there.

        The control token of a conditioned policy comes next; it does not count towards `max_prompt_tokens`. ValueError
        if a prompt is longer than that, or empty.
        """
        prompts = encode_prompts(self.tokenizer, self.template, instructions, max_tokens=self.max_prompt_tokens)
        control, bos = own_control_token(self._base_model), self.tokenizer.bos_token_id
        return prompts if control is None else [insert(prompt, control, bos) for prompt in prompts]

    def encode_responses(self, responses: Sequence[str], *, eos: bool = True) -> list[list[int]]:
        """Returns each response as token ids, as they continue a prompt; `eos` ends each as the template ends one."""
        ending = [self.template.end_id(self.tokenizer)] if eos else []
        return [row + ending for row in self.template.encode_responses(self.tokenizer, responses)]

    def as_rollouts(self, instructions: Sequence[str], responses: Sequence[str]) -> Rollouts:
        """Returns given responses as `Rollouts`, for training on them or scoring them; log-probabilities are 0.

        A response of more than `max_response_tokens` tokens, EOS included, is cut there and counts as not finished.
        """
        if len(instructions) != len(responses):
            raise ValueError(f"as_rollouts: {len(instructions)} instructions but {len(responses)} responses")
        encoded = self.encode_responses(responses)
        rows = [row[: self.max_response_tokens] for row in encoded]
        finished = [len(row) <= self.max_response_tokens for row in encoded]
        prompts = self.encode_prompts(instructions)
        return Rollouts.given(instructions, responses, prompts, rows, finished, self.device)

    def generate(
        self,
        instructions: Sequence[str],
        *,
        generator: torch.Generator | Sequence[torch.Generator] | Tensor,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        batch_size: int | None = None,
        num_samples: int = 1,
    ) -> Rollouts:
        """Samples `num_samples` responses to each of N instructions, in neighbouring rows, on the model's device.

        There is no top-k, top-p or penalty, so the log-probabilities are exact. Each row and step takes one uniform, in
        the order of the instructions, whatever batch of `batch_size` rows it is decoded in (None: 256 rows on a CPU,
        what fits into the free memory on a GPU). The generator is the source of all of them, or one an instruction, so
        that its responses do not depend on the others; or the uniforms themselves, [N x num_samples, max_new_tokens or
        more]. At temperature 0, the likeliest token at each step, it is not used.
        With a served `sampler` they decide each request's seed.

        Raises:
            ValueError: A number is out of range, the uniforms have another shape, a prompt is too long, or prompt and
                response exceed the positions the model knows.
        """
        width = self.max_response_tokens if max_new_tokens is None else max_new_tokens
        if not temperature >= 0 or min(width, 1 if batch_size is None else batch_size, num_samples) < 1:
            raise ValueError(
                "generate: expected temperature >= 0 and max_new_tokens, batch_size, num_samples >= 1, got "
                f"{temperature!r}, {width!r}, {batch_size!r}, {num_samples!r}"
            )
        prompts = [tokens for tokens in self.encode_prompts(instructions) for _ in range(num_samples)]
        longest = max(map(len, prompts), default=0)
        check_positions(self._base_model, longest + width)
        uniforms = draw_uniforms(generator, len(instructions), num_samples, width) if temperature > 0 else None
        options: dict[str, Any] = {
            "uniforms": uniforms,
            "max_new_tokens": width,
            "temperature": temperature,
            "eos_token_ids": self.eos_token_ids,
            "silent": control_tokens(self._base_model),
        }
        if self._sampler is not None:
            samples = self._sampler.sample(self, prompts, **options)
        else:
            with self._sampling_weights(width):
                rows = batch_size or sampling_rows(self._base_model, prompt=longest, response=width)
                samples = sample(self._base_model, prompts, batch_size=rows, **options)
        lengths, finished = samples.lengths, samples.finished
        # EOS is cut off by position: a tokenizer may not count it among the special tokens that decoding skips.
        text_lengths = lengths - finished.long()
        bare = [row.tolist() for row in ragged_split(unpad(samples.tokens, text_lengths).cpu(), text_lengths)]
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        prompt_tokens, prompt_lengths = ragged(prompts, self.device)
        return Rollouts(
            instructions=tuple(instruction for instruction in instructions for _ in range(num_samples)),
            texts=tuple(self.tokenizer.batch_decode(bare, **options) if bare else ()),
            prompt_tokens=prompt_tokens,
            prompt_lengths=prompt_lengths,
            tokens=unpad(samples.tokens, lengths),
            lengths=lengths,
            logprobs=unpad(samples.logprobs, lengths),
            finished=finished,
        )

    def _sampling_weights(self, passes: float) -> AbstractContextManager[None]:
        """So many passes without gradient inside read copies of the weights where that pays."""
        lower = self.precision == "bfloat16" and self.model.dtype == torch.float32
        merged = self._samples_merged and (passes >= MERGED_FROM or self.device.type == "cuda")
        return sampling_weights(self.model, merged=merged, dtype=torch.bfloat16 if lower else None)

    @cached_property
    def _samples_merged(self) -> bool:
        return merging_pays(self.model)  # once: a run's samples must not change with the memory that is free

    def logprobs(
        self, rollouts: Rollouts, *, role: str = "policy", temperature: float = 1.0, share_prompts: bool = False
    ) -> Tensor:
        """Returns log p(token | prompt, tokens before it) of every response token: flat [sum T] float32.

        Rows are padded on the right, where a causal model cannot see the pads: no number depends on the batch.

        Args:
            rollouts: B rows; split large batches with `rollouts.micro_batches`.
            role: "policy" (gradients flow if they are enabled) or "reference" (never).
            temperature: Divides the logits; must be that of sampling for the two to agree. 0 counts as 1, as there.
            share_prompts: Neighbours with equal prompts read them once, if the model can: see `shared_prompts`.

        Raises:
            ValueError: Unknown role, or a row longer than the positions the model knows.
            RuntimeError: The role is "reference" and there is none; call `add_reference` first.
        """
        tokens, read = rollouts.tokens.to(self.device), partial(self._read, rollouts, role, share_prompts)
        options: dict[str, Any] = {"temperature": temperature, "silent": control_tokens(self._base_model)}
        adapted = isinstance(self.model, peft.PeftModel)
        if adapted and (fast := without_logits(self._role(role), read, tokens, **options)) is not None:
            return fast
        return -nn.functional.cross_entropy(final_logits(read(), **options), tokens, reduction="none")

    def logits(self, rollouts: Rollouts, *, role: str = "policy", temperature: float = 1.0) -> Tensor:
        """Returns the logits at each response token's place: flat [sum T, V] float32; -inf for control tokens.

        Arguments and errors as of `logprobs`.
        """
        return final_logits(self._read(rollouts, role), temperature, control_tokens(self._base_model))

    def states(self, rollouts: Rollouts, *, pool: Literal["mean", "last"] = "mean") -> Tensor:
        """The last layer's hidden states at the response tokens of B rows, averaged, or the last: [B, H] float32.

        Without gradient, in `precision`, and prompts that several rows share are read once. NaN of an empty response.

        Raises:
            ValueError: A row is longer than the positions the model knows, or `pool` is unknown.
        """
        if pool not in ("mean", "last"):
            raise ValueError(f"states: expected pool 'mean' or 'last', got {pool!r}")
        check_positions(self._base_model, int(rollouts.total_lengths.max()) if len(rollouts) else 0)
        options = {"fill_token_id": self.tokenizer.eos_token_id, "max_tokens": tokens_at_once(self.device)}
        with self._sampling_weights(math.inf):
            return pooled_states(trunk_of(self.model), rollouts.to(self.device), pool=pool, **options)

    def add_reference(self) -> None:
        """Keeps a frozen copy of the policy as it is now as the reference; with LoRA, of what trains only."""
        if isinstance(self.model, peft.PeftModel):
            trained = ((name, value) for name, value in self.model.named_parameters() if value.requires_grad)
            self._reference_adapter = {name: value.detach().clone() for name, value in trained}
        else:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def add_control_tokens(self, names: Sequence[str], generator: torch.Generator) -> tuple[int, ...]:
        """Adds control tokens to tokenizer and embeddings, and begins prompts with the first; returns their ids.

        A new row, of input and output embeddings, is the mean of the old ones plus Gaussian jitter of their standard
        deviation in each dimension (AlpacaFarm's Quark). Tokens that are there already stay as they are. Where the
        model's positions hold no more than the longest prompt and response, the longest prompt gets one shorter. With
        LoRA the input embeddings of the new tokens become a part of the adapter (`model` is another object then).

        Raises:
            ValueError: The policy has other control tokens, a name is an ordinary token, or a server samples.
        """
        num_old = len(control_tokens(self._base_model))
        if self.sampler is not None and not num_old:
            raise ValueError("A server knows no control tokens: sample in this process (sampler=None).")
        ids = extend(self._base_model, self.tokenizer, names, generator)
        if not num_old and isinstance(self.model, peft.PeftModel):
            self.model = turn_off_dropout(with_tokens(self.model, ids))
        room = num_positions(self.model.config) - self.max_response_tokens - 1
        self.max_prompt_tokens = int(min(self.max_prompt_tokens, room))
        return ids

    def reward_oracle(self, folder: str | Path, **options: Any) -> RewardModel:
        """A LoRA reward adapter on this policy's own weights, as an oracle: see `adapters.reward_oracle`."""
        return reward_oracle(self.model, folder, pad_token_id=cast(int, self.tokenizer.pad_token_id), **options)

    def save(self, folder: str | Path, *, merged: bool = False, facts: Mapping[str, Any] | None = None) -> None:
        """Writes a folder with a model card of these `facts`; of a LoRA model the adapter, or `merged`, all of it."""
        base, adapted = self._base_model, isinstance(self.model, peft.PeftModel)
        extra = adapter_files(base) if adapted and not merged else {}
        model = merge(self.model) if adapted and merged else self.model
        save_files(folder, model, self.tokenizer, self.template, extra=extra, facts=facts)

    @property
    def _base_model(self) -> PreTrainedModel:
        """The model below a LoRA wrapper; its layers hold the adapters, so calling it is calling the policy."""
        model: Any = self.model.get_base_model() if isinstance(self.model, peft.PeftModel) else self.model
        return cast(PreTrainedModel, model)

    def _role(self, role: str) -> PreTrainedModel:
        """The model that plays a role, below a LoRA wrapper."""
        if role not in ROLES:
            raise ValueError(f"Unknown role {role!r}; roles: {', '.join(ROLES)}")
        if role == "reference" and self.reference is None and self._reference_adapter is None:
            raise RuntimeError("This language model has no reference yet; call add_reference() before training")
        return self.reference if role == "reference" and self.reference is not None else self._base_model

    def _read(self, rollouts: Rollouts, role: str, share_prompts: bool = False) -> Tensor:
        """What a role's output layer gives at each response token's place, [sum T, V]."""
        model = self._role(role)
        check_positions(self._base_model, int(rollouts.total_lengths.max()) if len(rollouts) else 1)
        reading = scoring_pass(model, rollouts.to(self.device), self.tokenizer.eos_token_id, share=share_prompts)
        with reading as inputs, torch.set_grad_enabled(torch.is_grad_enabled() and role == "policy"):
            if role == "policy" or model is self.reference:
                return cast(Tensor, (self.model if role == "policy" else model)(**inputs).logits)
            # The call sees the copies in place of the parameters; the model itself and its peft state stay untouched.
            return cast(Tensor, functional_call(self.model, self._reference_adapter or {}, kwargs=inputs).logits)
