"""Prompts as token ids, their limits, and the tokens that end, pad and condition texts.

No prompt is ever cut. One that is too long is counted and left out before training begins; one that a policy is asked
to answer, in `act` or in an evaluation, is refused.

The longest response travels with a model whose own is not the default: in its config.json, or beside a LoRA adapter in
alpacafarm_limits.json, as `alpacafarm_max_response_tokens`.

Models of a hub come without a padding token, or with several ends. Our own forward passes attend to no pad. A padding
token is needed by other libraries, which read a reward model's score at the last token that is no pad, and by a
tokenizer's `pad`; so what is chosen here travels with the model.

Control tokens are new tokens in front of a prompt that say how good the response to come shall be. Used by binary
reward conditioning (Dubois et al. 2023, sec. 4) and by Quark's all-quantile mode (Lu et al. 2022, arXiv:2205.13636).
They are inserted as ids behind BOS: no text encodes to one, and no model ever says one, as their logits count as -inf
everywhere. Which ids they are, and which of them the model's own prompts begin with, travels with the model in its
config.json, as `alpacafarm_control_tokens` and `alpacafarm_control_token`; with a LoRA adapter, which has no
config.json, in alpacafarm_control_tokens.json, and their embeddings are part of the adapter.
"""

import json
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..chat_templates import special_ids
from ..errors import DataError, warn_caller
from ..oracles.base import check_batch, shorten
from ..oracles.reward_model import num_positions
from ..pretrained import token_limits
from ..templates import PromptTemplate
from .rollouts import Rollouts, ragged, ragged_split

KEY = "alpacafarm_max_response_tokens"
ADAPTER_FILES = {
    "alpacafarm_limits.json": (KEY,),
    "alpacafarm_control_tokens.json": ("alpacafarm_control_tokens", "alpacafarm_control_token"),
}
"""What travels beside a LoRA adapter, which has no config.json: keys by file."""


def encode_prompts(
    tokenizer: Any, template: PromptTemplate, instructions: Sequence[str], *, max_tokens: int = sys.maxsize
) -> list[list[int]]:
    """Each instruction's prompt as token ids, with BOS if the tokenizer puts it there; errors as of the method."""
    check_batch(instructions)
    prompts = template.encode_prompts(tokenizer, instructions)
    for instruction, tokens in zip(instructions, prompts, strict=True):
        if not 0 < len(tokens) <= max_tokens:
            raise ValueError(
                f"A prompt must have 1 to {max_tokens} tokens, got {len(tokens)} for the instruction "
                f"{shorten(instruction)}; load the policy with a larger max_prompt_tokens (and, where its positions do "
                "not hold both, a smaller max_response_tokens), or leave the instruction out (of an environment: "
                "env.unwrapped.leave_out([id]))"
            )
    return prompts


def fit_limits(max_prompt_tokens: int | None, max_response_tokens: int | None, positions: float) -> tuple[int, int]:
    """The longest prompt and response, as `token_limits` has them; ValueError if they exceed the positions."""
    prompt, response = token_limits(max_prompt_tokens, max_response_tokens, positions)
    if prompt + response > positions:
        raise ValueError(
            f"Expected max_prompt_tokens and max_response_tokens that fit together into the {positions} positions that "
            f"the model has for them (a control token takes one), got {prompt} and {response}; None takes what fits"
        )
    return prompt, response


def settle_limits(model: Any, max_prompt_tokens: int | None, max_response_tokens: int | None) -> tuple[int, int]:
    """The limits of a policy; None takes the longest response that its config keeps. What is not default is kept there.

    Raises:
        ValueError: They do not fit the model's positions.
    """
    positions = num_positions(model.config) - (own_control_token(model) is not None)
    kept, wanted = getattr(model.config, KEY, None), max_response_tokens
    if kept is not None and wanted is None:
        wanted = kept if max_prompt_tokens is None else int(min(kept, max(positions - max_prompt_tokens, 1)))
    prompt, response = fit_limits(max_prompt_tokens, wanted, positions)
    if kept is not None or response != token_limits(None, None, positions)[1]:
        setattr(model.config, KEY, response)
    return prompt, response


def prompt_lengths(tokenizer: Any, template: PromptTemplate, instructions: Sequence[str]) -> list[int]:
    """The tokens of each instruction's prompt."""
    return [len(prompt) for prompt in encode_prompts(tokenizer, template, instructions)]


def up_to(limit: int, lengths: Sequence[int], *, who: str, advice: str) -> list[int]:
    """The numbers of the prompts of at most `limit` tokens; warns of the others, a DataError if that is all."""
    kept = [number for number, length in enumerate(lengths) if length <= limit]
    if len(kept) < len(lengths):
        count = len(lengths) - len(kept)
        share, longest = count / len(lengths), max(lengths)
        some = f"{count} of {len(lengths)} prompts ({share:.1%}) have more than {limit} tokens, the longest {longest}"
        if not kept:
            raise DataError(f"{who}: {some}, so there is nothing to train on. A prompt is never cut: {advice}.")
        warn_caller(f"{who}: {some}, and are left out of training. To train on them, {advice}.")
    return kept


def check_budget(micro_batch_tokens: int | None, longest: int, *, who: str) -> None:
    """Refuses, by a DataError, given micro-batches that could not hold the longest row."""
    if micro_batch_tokens is not None and micro_batch_tokens < longest:
        raise DataError(
            f"{who}: expected micro-batches of at least {longest} tokens, as the longest row can have, got "
            f"micro_batch_tokens={micro_batch_tokens}."
        )


_PAD = re.compile(r"(?<![a-z])pad(ding)?(?![a-z])", re.IGNORECASE)
_MEDIA = re.compile("image|vision|video|audio", re.IGNORECASE)
_UNUSED = re.compile("reserved|unused|placeholder|extra", re.IGNORECASE)
_NEW = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")


def check_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError unless the tokenizer has an end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no end-of-sequence token; without one no response ever ends")


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> tuple[int, ...]:
    """The tokens that end a response: that which the template writes, the tokenizer's EOS, the generation config's.

    A number that the generation config has only copied from the model's configuration does not count: that is often a
    default of the architecture.
    """
    config: Any = getattr(model, "generation_config", None)
    listed = getattr(config, "eos_token_id", None)
    if not isinstance(listed, list):
        listed = [] if listed is None or config._from_model_config else [listed]
    return tuple(dict.fromkeys([*_ends(tokenizer, template), *listed]))


def settle(model: Any, tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> None:
    """Makes tokenizer and configurations of a model agree on a padding token and on how responses are sampled and end.

    A padding token that is missing, or that ends responses itself, is replaced with a warning that names the choice:
    a padding token the tokenizer has under another name, one reserved for later use, the unknown token, a new token
    where the model embeds more than the tokenizer has, any other special token that the prompt does not use.

    Raises:
        ValueError: There is no such token, or no EOS.
    """
    check_eos(tokenizer)
    table, config = model.get_input_embeddings(), model.config.get_text_config()
    if tokenizer.pad_token_id in (None, *_ends(tokenizer, template)):
        _choose_pad(tokenizer, template, rows=table.weight.shape[0])
    pad = tokenizer.pad_token_id
    if getattr(config, "pad_token_id", None) != pad:
        config.pad_token_id = pad
        table.padding_idx = pad  # as if it had been loaded so: that row alone gets no gradient
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    generation.pad_token_id = pad
    if generation.repetition_penalty not in (None, 1.0):
        generation.repetition_penalty = 1.0  # responses are sampled, trained and judged without
    ends, listed = list(end_ids(model, tokenizer, template)), generation.eos_token_id
    if set(ends) != set(listed if isinstance(listed, list) else [listed]):
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]


def _ends(tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> list[int]:
    return [template.end_id(tokenizer), tokenizer.eos_token_id]


def _choose_pad(tokenizer: Any, template: PromptTemplate, *, rows: int) -> None:
    pad, vocabulary, source = tokenizer.pad_token, tokenizer.get_vocab(), str(tokenizer.chat_template)
    taken = {*template.encode_pairs(tokenizer, ["a"], ["b"], eos=True)[0], *_ends(tokenizer, template)}
    ids = sorted(number for number in special_ids(tokenizer) - taken if number < rows)
    free = [name for name in tokenizer.convert_ids_to_tokens(ids) if name not in source and not _MEDIA.search(name)]
    named = [name for pattern in (_PAD, _UNUSED) for name in free if pattern.search(name)]
    unknown = [tokenizer.unk_token] if tokenizer.unk_token_id not in {None, *taken} else []
    new = [name for name in _NEW if name not in vocabulary] if len(tokenizer) < rows else []
    choices = [*named, *unknown, *new, *free]
    if not choices:
        what = "none" if pad is None else f"{pad!r}, which ends a response"
        raise ValueError(
            f"Expected a padding token that ends no response, got {what}, and no other token can be one. Add it: "
            "tokenizer.add_special_tokens({'pad_token': '[PAD]'}); model.resize_token_embeddings(len(tokenizer))"
        )
    tokenizer.add_special_tokens({"pad_token": choices[0]})
    was = "no padding token" if pad is None else f"{pad!r} as padding token, which ends a response"
    warnings.warn(f"The tokenizer has {was}: {choices[0]!r} takes its place, in what is saved too.", stacklevel=4)


# Control tokens -------------------------------------------------------------------------------------------------------


def check_positions(model: Any, length: int) -> None:
    """ValueError if a model knows fewer positions than `length`."""
    limit = num_positions(model.config)
    if length > limit:
        raise ValueError(
            f"Prompt and response take {length} tokens, but the model knows {limit} positions "
            "(max_position_embeddings); lower max_new_tokens or max_response_tokens"
        )


def control_tokens(model: Any) -> tuple[int, ...]:
    """Ids of a model's control tokens."""
    return tuple(getattr(model.config, "alpacafarm_control_tokens", None) or ())


def own_control_token(model: Any) -> int | None:
    """The control token that the model's own prompts begin with, if any."""
    return getattr(model.config, "alpacafarm_control_token", None)


def extend(model: Any, tokenizer: Any, names: Sequence[str], generator: torch.Generator) -> tuple[int, ...]:
    """Adds control tokens to embeddings and tokenizer; see `LanguageModel.add_control_tokens`."""
    vocabulary = tokenizer.get_vocab()
    if old := control_tokens(model):
        if old == tuple(vocabulary.get(name) for name in names):
            return old
        spelled = tokenizer.convert_ids_to_tokens(list(old))
        raise ValueError(f"Expected a policy without control tokens, or with {list(names)}, got one with {spelled}.")
    if taken := [name for name in names if name in vocabulary]:
        raise ValueError(f"{taken} are ordinary tokens of the tokenizer already; choose other names.")
    num_old = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)}, replace_extra_special_tokens=False)
    ids = list(tokenizer.convert_tokens_to_ids(list(names)))
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tables = {id(table.weight): table.weight for table in (model.get_input_embeddings(), model.get_output_embeddings())}
    with torch.no_grad():
        for weight in tables.values():  # one table where they are tied
            mean, std = weight[:num_old].mean(0), weight[:num_old].std(0)
            jitter = torch.randn(len(ids), weight.shape[1], generator=generator).to(weight)
            weight[ids] = mean + jitter * std
    model.config.alpacafarm_control_tokens, model.config.alpacafarm_control_token = ids, ids[0]
    return tuple(ids)


def adapter_files(model: Any) -> dict[str, Any]:
    """Files of an adapter's folder by their names, JSON-able: limit and control tokens, where they are not default."""
    return {
        file: {key: getattr(model.config, key, None) for key in keys}
        for file, keys in ADAPTER_FILES.items()
        if getattr(model.config, keys[0], None)
    }


def read_adapter_files(model: Any, folder: Path, num_tokens: int) -> None:
    """Gives a base model what `adapter_files` wrote, and embeddings for the control tokens among `num_tokens`."""
    for file in ADAPTER_FILES:
        if (folder / file).is_file():
            for key, value in json.loads((folder / file).read_text(encoding="utf-8")).items():
                setattr(model.config, key, value)
    num_old = model.get_input_embeddings().weight.shape[0]
    if control_tokens(model) and num_tokens > num_old:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight.data[num_old:] = 0  # what is read in their place is the adapter's


def silence(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Logits [..., V] with -inf for `tokens`; gradients pass through the others."""
    if not tokens:
        return logits
    columns = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    for token in tokens:  # not by a list, which would be copied to the device at each step of sampling
        columns[token] = True
    return logits.masked_fill(columns, -torch.inf)


def final_logits(given: Tensor, temperature: float, silent: Sequence[int]) -> Tensor:
    """What an output layer gave, in float32, without `silent` tokens and divided by the temperature; 0 counts as 1."""
    logits = silence(given.float(), silent)
    return logits if temperature in (0, 1) else logits / temperature


def insert(prompt: Sequence[int], token: int | None, bos: int | None) -> list[int]:
    """A prompt's ids with `token` in front, behind BOS if the prompt begins with it; None changes nothing."""
    start = 1 if bos is not None and list(prompt[:1]) == [bos] else 0
    return [*prompt[:start], *([] if token is None else [token]), *prompt[start:]]


def conditioned(rollouts: Rollouts, tokens: Sequence[int], *, bos: int | None) -> Rollouts:
    """The rollouts with the control token of its row in front of each prompt (which must have none yet)."""
    if len(tokens) != len(rollouts):
        raise ValueError(f"conditioned: expected a token for each of {len(rollouts)} rows, got {len(tokens)}")
    prompts = ragged_split(rollouts.prompt_tokens, rollouts.prompt_lengths)
    rows = [insert(prompt.tolist(), token, bos) for prompt, token in zip(prompts, tokens, strict=True)]
    return _with_prompts(rollouts, rows)


def unconditioned(rollouts: Rollouts, tokens: Sequence[int]) -> Rollouts:
    """The rollouts without `tokens` in their prompts. Only control tokens, which no text encodes to, may be taken."""
    if not tokens:
        return rollouts
    prompts = ragged_split(rollouts.prompt_tokens, rollouts.prompt_lengths)
    rows = [[token for token in prompt.tolist() if token not in tokens] for prompt in prompts]
    return _with_prompts(rollouts, rows)


def _with_prompts(rollouts: Rollouts, prompts: Sequence[Sequence[int]]) -> Rollouts:
    prompt_tokens, prompt_lengths = ragged(prompts, rollouts.tokens.device)
    return replace(rollouts, prompt_tokens=prompt_tokens, prompt_lengths=prompt_lengths)
