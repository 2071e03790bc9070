"""A prompt that a model reads once, for all responses to it that are scored together."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..pretrained import cache_keyword


def alike(rows: Sequence[list[int]], instructions: Sequence[str], worth: float) -> Iterator[tuple[int, list[int]]]:
    """Yields rows of tokens that begin alike: how many tokens they share, and which they are.

    Those of an instruction do where this spares `worth` tokens or more; all others are one group, which shares none.
    """
    asked: dict[str, list[int]] = {}
    for number, instruction in enumerate(instructions):
        asked.setdefault(str(instruction), []).append(number)
    rest: list[int] = []
    for group in asked.values():
        shared = shared_start([rows[number] for number in group])
        if shared * (len(group) - 1) >= worth:
            yield shared, group
        else:
            rest += group
    if rest:
        yield 0, sorted(rest)


def shared_start(rows: Sequence[list[int]] | Sequence[tuple[int, ...]]) -> int:
    """How many tokens all rows begin with; each keeps at least one of its own."""
    first, last = min(rows), max(rows)  # in between, all begin as these two do
    most = min(len(first), len(last)) - 1
    return next((place for place in range(most) if first[place] != last[place]), most)


def reads_in_parts(model: Any) -> bool:
    """Whether a sequence classifier is known to read a text's end by a cache of its beginning."""
    from ..last_layer import pad_before_score, without_adapters

    bare = without_adapters(model)
    config = bare.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) | {"full_attention"}
    causal = not getattr(config, "use_bidirectional_attention", False)
    takes_cache = cache_keyword(bare) in inspect.signature(bare.forward).parameters
    return pad_before_score(model) is not None and kinds == {"full_attention"} and causal and takes_cache


def read_once(model: Any, prompt: list[int]) -> Callable[[int], dict[str, Any]]:
    """Reads a prompt; what is returned gives a number of rows the inputs that stand for it in a forward pass."""
    import torch
    from transformers import DynamicCache

    from ..last_layer import without_adapters

    if not prompt:
        return lambda num: {"use_cache": False}
    cache: Any = DynamicCache()
    keyword = cache_keyword(without_adapters(model))
    model(input_ids=torch.tensor([prompt], device=model.device), use_cache=True, **{keyword: cache})

    def inputs(num: int) -> dict[str, Any]:
        wide = copy.deepcopy(cache)
        for layer in wide.layers:
            layer.keys, layer.values = (part.expand(num, -1, -1, -1) for part in (layer.keys, layer.values))
        return {keyword: wide, "use_cache": True}

    return inputs
