"""Control tokens: new tokens in front of a prompt that say how good the response to come shall be.

Used by binary reward conditioning (Dubois et al. 2023, sec. 4) and by Quark's all-quantile mode (Lu et al. 2022,
arXiv:2205.13636). They are inserted as ids behind BOS: no text encodes to one, and no model ever says one, as their
logits count as -inf everywhere. Which ids they are, and which of them the model's own prompts begin with, travels with
the model in its config.json, as `alpacafarm_control_tokens` and `alpacafarm_control_token`; with a LoRA adapter, which
has no config.json, in alpacafarm_control_tokens.json, and their embeddings are part of the adapter.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .rollouts import Rollouts, ragged, ragged_split

FILE = "alpacafarm_control_tokens.json"


def control_tokens(model: Any) -> tuple[int, ...]:
    """Ids of a model's control tokens."""
    return tuple(getattr(model.config, "alpacafarm_control_tokens", None) or ())


def own_control_token(model: Any) -> int | None:
    """The control token that the model's own prompts begin with, if any."""
    return getattr(model.config, "alpacafarm_control_token", None)


def extend(model: Any, tokenizer: Any, names: Sequence[str], generator: torch.Generator) -> tuple[int, ...]:
    """Adds control tokens to embeddings and tokenizer; see `LanguageModel.add_control_tokens`."""
    known = tokenizer.get_vocab()
    if old := control_tokens(model):
        if old == tuple(known.get(name) for name in names):
            return old
        spelled = tokenizer.convert_ids_to_tokens(list(old))
        raise ValueError(f"Expected a policy without control tokens, or with {list(names)}, got one with {spelled}.")
    if taken := [name for name in names if name in known]:
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


def settings(model: Any) -> dict[str, Any]:
    """What the folder of an adapter has in a file, by its name; nothing without control tokens."""
    keys = ("alpacafarm_control_tokens", "alpacafarm_control_token")
    return {FILE: {key: getattr(model.config, key) for key in keys}} if control_tokens(model) else {}


def prepare(model: Any, folder: Path, num_tokens: int) -> None:
    """Gives a base model what an adapter's control tokens need: their number of embeddings, and which they are."""
    if not (folder / FILE).is_file():
        return
    for key, value in json.loads((folder / FILE).read_text(encoding="utf-8")).items():
        setattr(model.config, key, value)
    num_old = model.get_input_embeddings().weight.shape[0]
    if num_tokens > num_old:
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
