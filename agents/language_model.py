"""A language model as the agents see it: instructions in, `Rollouts` and log-probabilities out.

`LanguageModel` joins a causal language model with its tokenizer and prompt template. It plays roles: `"policy"` is the
model being trained, `"reference"` the one it started from (a frozen copy, or the same trunk with a frozen copy of its
LoRA adapters). Dropout is off in every role, so that a token's log-probability is one number.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import peft
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..chat_templates import load_template
from ..errors import CheckpointError
from ..folders import check_model
from ..oracles.reward_model import num_positions
from ..pretrained import adapter_base, load_model, load_tokenizer, reading
from ..templates import PromptTemplate
from .control_tokens import control_tokens, insert, own_control_token, silence
from .output_layer import output_layer_at
from .rollouts import Rollouts, ragged, scoring_batch, unpad
from .sampling import sample
from .saving import save_files
from .text import decode_rows, encode_prompts, encode_responses, fit_limits

ROLES = ("policy", "reference")


class LanguageModel:
    """A causal language model with its tokenizer and prompt template.

    Args:
        model: Any Hugging Face causal language model, or a `PeftModel` of one. Its dropout is set to 0, for good.
        tokenizer: Needs an end-of-sequence token and a padding token that differ.
        template: How an instruction becomes a prompt.
        max_prompt_tokens: Longest prompt accepted. None: AlpacaFarm's 192, less if the model has no positions for that
            beside a response.
        max_response_tokens: Longest response sampled. None: AlpacaFarm's 300, or as many as the longest prompt leaves
            free, if that is less (64 for the sandbox's policy, which knows 256 positions).

    Raises:
        ValueError: The tokenizer has no EOS token, no padding token, one token for both, or more tokens than the model;
            or the longest prompt and response that were asked for do not fit the model's positions.
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
        check_special_tokens(tokenizer)
        self.model: Any = turn_off_dropout(model)
        self.tokenizer = tokenizer
        self.template = template
        positions = num_positions(self._base_model.config) - (own_control_token(self._base_model) is not None)
        self.max_prompt_tokens, self.max_response_tokens = fit_limits(max_prompt_tokens, max_response_tokens, positions)
        self.reference: PreTrainedModel | None = None
        self._reference_adapter: dict[str, Tensor] | None = None
        known = cast(Tensor, self._base_model.get_input_embeddings().weight).shape[0]
        if len(tokenizer) > known:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens but the model embeds {known}; give the two that belong "
                "together, or call model.resize_token_embeddings(len(tokenizer))"
            )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        lora: peft.LoraConfig | None = None,
        template: PromptTemplate | str | None = None,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
    ) -> LanguageModel:
        """Loads a model folder (or hub name) with its tokenizer and the prompt template it was trained on.

        A folder that `save` wrote for a LoRA model holds the adapter only and names the folder of its base model.

        Args:
            path: Folder or hub name.
            device: Where the model runs.
            dtype: Of its weights; log-probabilities are float32 in any case.
            lora: Adds a fresh adapter, the only part that trains. It starts as the identity.
            template: "alpaca" or a template of one's own, in the place of what the folder says. None: its
                `prompt_template.json`, else its tokenizer's `chat_template`, and an error if it has neither.
            max_prompt_tokens: As in `LanguageModel`.
            max_response_tokens: As in `LanguageModel`.

        Raises:
            CheckpointError: There is no such folder, it is damaged or needs code of its own, or `lora` is given for a
                folder that is an adapter already.
            DataError: The folder has no template and none is given, or its template cannot be used.
        """
        check_model(path)
        tokenizer = load_tokenizer(path)
        with reading(path, "a language model's tokenizer"):
            check_special_tokens(tokenizer)
        is_adapter = (Path(path) / "adapter_config.json").is_file()
        if is_adapter and lora is not None:
            raise CheckpointError(f"{path} is a LoRA adapter already; load it without lora= to go on training it")
        base: Any = adapter_base(path) if is_adapter else path
        model, _ = load_model("AutoModelForCausalLM", base, dtype=dtype)
        if is_adapter:
            with reading(path, "a LoRA adapter"), warnings.catch_warnings():
                warnings.filterwarnings("error", message="Found missing adapter keys")
                model = peft.PeftModel.from_pretrained(model, str(path), is_trainable=True)
        elif lora is not None:
            model = peft.get_peft_model(model, copy.deepcopy(lora))  # peft writes the base model's name into it
        return cls(
            model.to(device),
            tokenizer,
            load_template(path, tokenizer, template),
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a response when sampling; the first is the one that ends it in training.

        A generation config that lists several adds them.
        """
        first, listed = self.template.end_id(self.tokenizer), self._base_model.generation_config.eos_token_id
        return tuple(dict.fromkeys([first, self.tokenizer.eos_token_id, *(listed if isinstance(listed, list) else ())]))

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        device: torch.device = next(self.model.parameters()).device
        return device

    # Text and tokens ---------------------------------------------------------------------------------------------

    def encode_prompts(self, instructions: Sequence[str]) -> list[list[int]]:
        """Returns each instruction's prompt as token ids, BOS in front if the tokenizer puts it there.

        The control token of a conditioned policy comes next; it does not count towards `max_prompt_tokens`.

        Raises:
            ValueError: A prompt has more than `max_prompt_tokens` tokens, or none.
        """
        prompts = encode_prompts(self.tokenizer, self.template, instructions, max_tokens=self.max_prompt_tokens)
        control, bos = own_control_token(self._base_model), self.tokenizer.bos_token_id
        return prompts if control is None else [insert(prompt, control, bos) for prompt in prompts]

    def encode_responses(self, responses: Sequence[str], *, eos: bool = True) -> list[list[int]]:
        """Returns each response as token ids, as they continue a prompt; `eos` ends each as the template ends one."""
        return encode_responses(self.tokenizer, self.template, responses, eos=eos)

    def as_rollouts(self, instructions: Sequence[str], responses: Sequence[str]) -> Rollouts:
        """Returns given responses as `Rollouts`, for training on them or scoring them; log-probabilities are 0.

        A response of more than `max_response_tokens` tokens, EOS included, is cut there and counts as not finished.

        Raises:
            ValueError: A prompt is too long, or the two sequences differ in length.
        """
        if len(instructions) != len(responses):
            raise ValueError(f"as_rollouts: {len(instructions)} instructions but {len(responses)} responses")
        encoded = self.encode_responses(responses)
        prompt_tokens, prompt_lengths = ragged(self.encode_prompts(instructions), self.device)
        tokens, lengths = ragged([row[: self.max_response_tokens] for row in encoded], self.device)
        return Rollouts(
            instructions=tuple(instructions),
            texts=tuple(responses),
            prompt_tokens=prompt_tokens,
            prompt_lengths=prompt_lengths,
            tokens=tokens,
            lengths=lengths,
            logprobs=torch.zeros(len(tokens), device=self.device),
            finished=torch.tensor([len(row) <= self.max_response_tokens for row in encoded], device=self.device),
        )

    # What a model does: sample and score ----------------------------------------------------------------------------

    def generate(
        self,
        instructions: Sequence[str],
        *,
        generator: torch.Generator | Sequence[torch.Generator] | Tensor,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        batch_size: int = 256,
        num_samples: int = 1,
    ) -> Rollouts:
        """Samples responses from the policy; no top-k, no top-p, no penalties, so the log-probabilities are exact.

        The generator gives one uniform for each row and step, in the order of the instructions. Which batch a row is
        decoded in therefore does not matter, and the generator moves on by the same amount whatever is sampled.

        Args:
            instructions: N instructions.
            generator: Source of all randomness, or one an instruction, so that its responses do not depend on what
                else is asked; or the uniforms themselves, [N x num_samples, max_new_tokens or more]; not used at
                temperature 0.
            temperature: Above 0; or 0 for the likeliest token at each step.
            max_new_tokens: Longest response; `max_response_tokens` if None.
            batch_size: Rows decoded together.
            num_samples: Responses to each instruction, in neighbouring rows.

        Returns:
            N x num_samples rows in order, on the model's device.

        Raises:
            ValueError: A number is out of range, the uniforms have another shape, a prompt is too long, or prompt and
                response exceed the positions the model knows.
        """
        width = self.max_response_tokens if max_new_tokens is None else max_new_tokens
        if not temperature >= 0 or width < 1 or batch_size < 1 or num_samples < 1:
            raise ValueError(
                "generate: expected temperature >= 0 and max_new_tokens, batch_size, num_samples >= 1, got "
                f"{temperature!r}, {width!r}, {batch_size!r}, {num_samples!r}"
            )
        prompts = [tokens for tokens in self.encode_prompts(instructions) for _ in range(num_samples)]
        self._check_positions(max(map(len, prompts), default=0) + width)
        uniforms = draw_uniforms(generator, len(instructions), num_samples, width) if temperature > 0 else None
        samples = sample(
            self._base_model,
            prompts,
            uniforms=uniforms,
            max_new_tokens=width,
            temperature=temperature,
            eos_token_ids=self.eos_token_ids,
            batch_size=batch_size,
            silent=control_tokens(self._base_model),
        )
        lengths, finished = samples.lengths, samples.finished
        # EOS is cut off by position: a tokenizer may not count it among the special tokens that decoding skips.
        text_lengths = lengths - finished.long()
        prompt_tokens, prompt_lengths = ragged(prompts, self.device)
        return Rollouts(
            instructions=tuple(instruction for instruction in instructions for _ in range(num_samples)),
            texts=decode_rows(self.tokenizer, unpad(samples.tokens, text_lengths), text_lengths),
            prompt_tokens=prompt_tokens,
            prompt_lengths=prompt_lengths,
            tokens=unpad(samples.tokens, lengths),
            lengths=lengths,
            logprobs=unpad(samples.logprobs, lengths),
            finished=finished,
        )

    def logprobs(self, rollouts: Rollouts, *, role: str = "policy", temperature: float = 1.0) -> Tensor:
        """Returns log p(token | prompt, tokens before it) of every response token: flat [sum T] float32.

        Prompt and response are padded on the right, where a causal model cannot see the pads: no mask is needed, and a
        row's numbers do not depend on its batch. The output layer runs on the positions that predict a response token
        only. Split large batches with `rollouts.micro_batches`.

        Args:
            rollouts: B rows.
            role: "policy" (gradients flow if they are enabled) or "reference" (never).
            temperature: Divides the logits; must be the one of sampling for the two to agree. At 0, which has no
                distribution to speak of, 1 is used, as by the sampler.

        Raises:
            ValueError: Unknown role, or a row longer than the positions the model knows.
            RuntimeError: The role is "reference" and there is none; call `add_reference` first.
        """
        logits = self.logits(rollouts, role=role, temperature=temperature)
        return -nn.functional.cross_entropy(logits, rollouts.tokens.to(logits.device), reduction="none")

    def logits(self, rollouts: Rollouts, *, role: str = "policy", temperature: float = 1.0) -> Tensor:
        """Returns the scores of every possible token at each response token's place: flat [sum T, V] float32.

        Control tokens have -inf: no role ever says one. Arguments and errors as of `logprobs`.
        """
        if role not in ROLES:
            raise ValueError(f"Unknown role {role!r}; roles: {', '.join(ROLES)}")
        ids, predicts = scoring_batch(rollouts.to(self.device), fill_token_id=self.tokenizer.eos_token_id)
        self._check_positions(ids.shape[1])
        if role == "policy":
            with output_layer_at(self._base_model, predicts):
                logits = self.model(input_ids=ids, use_cache=False).logits
        else:
            logits = self._reference_logits(ids, predicts)
        logits = silence(logits.float(), control_tokens(self._base_model))
        return logits if temperature in (0, 1) else logits / temperature

    # Roles and storage -------------------------------------------------------------------------------------------

    def add_reference(self) -> None:
        """Makes the policy as it is now the reference.

        A frozen copy is kept: of a LoRA model the trainable parameters only, since the frozen trunk serves both. They
        need not be the identity: the adapter may have been trained before.
        """
        if isinstance(self.model, peft.PeftModel):
            trained = ((name, value) for name, value in self.model.named_parameters() if value.requires_grad)
            self._reference_adapter = {name: value.detach().clone() for name, value in trained}
        else:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def save(self, folder: str | Path) -> None:
        """Writes model (safetensors), tokenizer and template; of a LoRA model the adapter only.

        All files are written beside the folder and then renamed into it.
        """
        save_files(folder, self.model, self.tokenizer, self.template)

    @property
    def _base_model(self) -> PreTrainedModel:
        """The model below a LoRA wrapper; its layers hold the adapters, so calling it is calling the policy."""
        model: Any = self.model.get_base_model() if isinstance(self.model, peft.PeftModel) else self.model
        return cast(PreTrainedModel, model)

    def _reference_logits(self, ids: Tensor, predicts: Tensor) -> Tensor:
        if self.reference is None and self._reference_adapter is None:
            raise RuntimeError("This language model has no reference yet; call add_reference() before training")
        inputs = {"input_ids": ids, "use_cache": False}
        with torch.no_grad(), output_layer_at(self.reference or self._base_model, predicts):
            if self.reference is not None:
                return cast(Tensor, self.reference(**inputs).logits)
            # The call sees the copies in place of the parameters; the model itself and its peft state stay untouched.
            return cast(Tensor, functional_call(self.model, self._reference_adapter or {}, kwargs=inputs).logits)

    def _check_positions(self, length: int) -> None:
        limit = num_positions(self._base_model.config)
        if length > limit:
            raise ValueError(
                f"Prompt and response take {length} tokens, but the model knows {limit} positions "
                f"(max_position_embeddings); lower max_new_tokens or max_response_tokens"
            )


def turn_off_dropout(model: Any) -> Any:
    """Sets every dropout probability of a model to 0 and the model to eval mode; returns it.

    A zero and not eval mode alone: gradient checkpointing needs train mode.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model.eval()


def check_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError unless the tokenizer has an EOS and a padding token, and they differ."""
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if eos is None:
        raise ValueError("The tokenizer has no end-of-sequence token; without one no response ever ends")
    if pad is None or pad == eos:
        found = "none" if pad is None else f"the end-of-sequence token {tokenizer.eos_token!r} (id {pad})"
        raise ValueError(
            f"The tokenizer needs a padding token that differs from the end-of-sequence token, got {found}. Add one: "
            "tokenizer.add_special_tokens({'pad_token': '[PAD]'}); model.resize_token_embeddings(len(tokenizer))"
        )


def draw_uniforms(
    source: torch.Generator | Sequence[torch.Generator] | Tensor, num: int, num_samples: int, width: int
) -> Tensor:
    """Returns the random numbers of `LanguageModel.generate`, [num x num_samples, width or more] in [0, 1).

    Raises:
        ValueError: They are given in another shape, or there is neither one generator nor one an instruction.
    """
    if isinstance(source, Tensor):
        if source.shape[:-1] != (num * num_samples,) or source.shape[-1] < width:
            raise ValueError(
                f"generate: expected uniforms of shape [{num * num_samples}, {width}], a row a response, got "
                f"{list(source.shape)}"
            )
        return source
    sources = [source] if isinstance(source, torch.Generator) else source
    if len(sources) not in (1, num):
        raise ValueError(f"generate: expected 1 or {num} generators, got {len(sources)}")
    rows = num * num_samples // max(1, len(sources))  # [] where there is no instruction to draw for
    parts = [torch.rand(rows, width, generator=each, device=each.device) for each in sources]
    return torch.cat(parts) if parts else torch.rand(0, width)
