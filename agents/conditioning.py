"""A policy gets control tokens: rows of its embeddings, and room for one in front of its prompts."""

from __future__ import annotations

from collections.abc import Sequence

import peft
import torch

from ..oracles.reward_model import num_positions
from .control_tokens import control_tokens
from .language_model import LanguageModel
from .loop import keyed_generator


def add_control_tokens(policy: LanguageModel, names: Sequence[str], *, seed: int) -> tuple[int, ...]:
    """Add control tokens to a policy's tokenizer and embeddings; its own prompts will begin with the first of them.

    A new row, of input and output embeddings, is the mean of the old ones plus Gaussian jitter of their standard
    deviation in each dimension (AlpacaFarm's Quark). A policy that has these tokens already keeps them as they are.
    Where the model's positions hold no more than the longest prompt and response, the longest prompt is one shorter.

    Args:
        policy: Changed in place.
        names: Spellings, such as "<reward_0>".
        seed: Of the jitter.

    Returns:
        Their ids, in the order of `names`.

    Raises:
        ValueError: The policy has other control tokens, a name is an ordinary token, or the policy trains a LoRA
            adapter, which has no place for new embeddings.
    """
    model, tokenizer = policy.model, policy.tokenizer
    if isinstance(model, peft.PeftModel):
        raise ValueError(
            "Control tokens need embeddings of their own, which a LoRA adapter does not hold; merge the adapter into "
            "the model (merge_and_unload) or train all weights."
        )
    known = tokenizer.get_vocab()
    if old := control_tokens(model):
        if old == tuple(known.get(name) for name in names):
            _make_room(policy)
            return old
        spelled = tokenizer.convert_ids_to_tokens(list(old))
        raise ValueError(f"Expected a policy without control tokens, or with {list(names)}, got one with {spelled}.")
    if taken := [name for name in names if name in known]:
        raise ValueError(f"{taken} are ordinary tokens of the tokenizer already; choose other names.")
    num_old = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)}, replace_extra_special_tokens=False)
    vocabulary = tokenizer.get_vocab()
    ids = tuple(vocabulary[name] for name in names)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    generator = keyed_generator(seed, "control tokens")
    tables = {id(table.weight): table.weight for table in (model.get_input_embeddings(), model.get_output_embeddings())}
    with torch.no_grad():
        for weight in tables.values():  # one table where they are tied
            mean, std = weight[:num_old].mean(0), weight[:num_old].std(0)
            jitter = torch.randn(len(ids), weight.shape[1], generator=generator).to(weight)
            weight[list(ids)] = mean + jitter * std
    model.config.alpacafarm_control_tokens, model.config.alpacafarm_control_token = list(ids), ids[0]
    _make_room(policy)
    return ids


def _make_room(policy: LanguageModel) -> None:
    """Let the longest prompt give way to the control token, as when a conditioned policy is loaded."""
    room = num_positions(policy.model.config) - policy.max_response_tokens - 1
    policy.max_prompt_tokens = int(min(policy.max_prompt_tokens, room))
