"""Learned reward models: any Hugging Face sequence-classification model with one label, whole or a LoRA adapter.

A folder holds config.json, safetensors weights and a tokenizer, and may hold the prompt template the model was trained
with (prompt_template.json). The folder of an adapter is peft's (adapter_config.json, which names the base model, and
adapter_model.safetensors); in place of config.json it may have alpacafarm_reward.json. Four optional keys of either are
ours:

* `alpacafarm_end_with_eos` (default true): whether texts end with the end-of-sequence token, where the score is read.
* `alpacafarm_max_length`: the most tokens of a text in training; longer ones lose their middle here as there.
* `alpacafarm_reward_mean`, `alpacafarm_reward_std`: scores are (score - mean) / std.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from ..bases import adapter_base, read_json
from ..bases import is_adapter as is_adapter
from ..chat_templates import ChatTemplate, check_template, load_template
from ..errors import CheckpointError, DataError
from ..folders import snapshot
from ..pretrained import PICKLED, file_states, load_adapter, load_model, load_tokenizer, reading
from ..templates import PromptTemplate
from .base import DetailedOracle, OracleError, Verdicts, shorten
from .shared_prompts import alike, read_once, reads_in_parts

if TYPE_CHECKING:
    import torch

DType = Literal["float32", "bfloat16", "float16"]
KIND: Final = "AutoModelForSequenceClassification"
OWN_CONFIG: Final = "alpacafarm_reward.json"
"""File of an adapter's folder with what a whole model has in its config.json, which would make transformers take the
folder for a whole model's.
"""


class RewardModel(DetailedOracle):
    """Scores a response with a learned model; unbounded.

    The model reads template.render(instruction) + response + EOS; by a tokenizer's chat template, the conversation of a
    user's message and its answer. Special tokens that a text spells out are read as plain text, so a response cannot
    end itself early or pose as another turn. The score is read where plain transformers reads it: at the last token
    that is not the pad of config.json, or where that names none at the last one. Texts are scored in batches of
    similar length, padded on the right, with attention masks: a score does not depend on the rest of the batch (to
    1e-5).

    A text longer than the model can read loses its middle: cutting the end off, as is often done, would hide from the
    model whatever a long response ends with. The detail `reward_input_truncated` marks such rows.

    torch is imported and the weights are read at first use; the folder is checked at once.

    Args:
        path: The folder, or a hub name, whose files are downloaded at once unless they are stored already.
        batch_size: Most texts in one forward pass; with their pads they have at most 2,048 tokens on a CPU, 16,384
            elsewhere (a single text may exceed that). A prompt of many responses is read once.
        device: "auto" takes the first CUDA device if there is one, else the CPU; or any name torch knows.
        dtype: "float32", "bfloat16" or "float16", that of the weights; by default bfloat16 on CUDA, float32 elsewhere.
            The head is float32 in any case.
        max_length: Most tokens of a text, at most as many as the model has positions; by default as in training.
        template: "alpaca" or a template of one's own, instead of the folder's.
        name: "reward_model:" and the folder's name by default.
        base: For an adapter, what makes the model below it, instead of loading that by its name; its weights may be
            others' too (`LanguageModel.reward_oracle`). Their dtype and place count then.

    Raises:
        CheckpointError: There is no such folder or hub name, no safetensors weights, not one score, or a faulty
            config.json.
        DataError: The folder has no template, and none is given.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        batch_size: int = 256,
        device: str = "auto",
        dtype: DType | None = None,
        max_length: int | None = None,
        template: PromptTemplate | str | None = None,
        name: str | None = None,
        base: Callable[[], Any] | None = None,
    ) -> None:
        if batch_size < 1 or (max_length is not None and max_length < 2):
            raise ValueError(f"batch_size must be 1, max_length 2 or more, got {batch_size!r} and {max_length!r}.")
        self.path = model_folder(path)
        self.batch_size = batch_size
        self.device, self.dtype, self._base = device, dtype, base
        self.name = name or f"reward_model:{Path(path).name}"
        self._config = check_folder(self.path)
        check_template(self.path, template)
        self._named = template
        self._files = file_states(self.path)
        trained_at = self._number("alpacafarm_max_length", math.inf, low=2)
        self.max_length = trained_at if max_length is None else max_length
        self._mean = self._number("alpacafarm_reward_mean", 0.0)
        self._std = self._number("alpacafarm_reward_std", 1.0, low=1e-30)

    def judge(self, instructions: Sequence[str], responses: Sequence[str]) -> Verdicts:
        """Scores [B], never NaN, with the detail `reward_input_truncated`.

        Raises CheckpointError if the folder cannot be loaded or has changed, OracleError for a score that is not
        finite.
        """
        rows = self.encode(instructions, responses)
        limit = self._limit
        truncated = np.array([len(row) > limit for row in rows], bool)
        scores = self._forward([cut_middle(row, limit) for row in rows], instructions)
        if not np.isfinite(scores).all():
            row = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise OracleError(
                f"The reward model in {str(self.path)!r} gave {scores[row]!r} for the response "
                f"{shorten(responses[row])}. Its weights are broken: train it again, or use another one."
            )
        return Verdicts((scores - self._mean) / self._std, {"reward_input_truncated": truncated})

    def encode(self, instructions: Sequence[str], responses: Sequence[str]) -> list[list[int]]:
        """The token ids that the model reads of each row, before anything is cut."""
        eos = self._config.get("alpacafarm_end_with_eos", True)
        return self._template.encode_pairs(self._tokenizer, instructions, responses, eos=eos)

    @cached_property
    def _template(self) -> PromptTemplate:
        return load_template(self.path, self._tokenizer, self._named)

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizer = load_tokenizer(self.path, local_files_only=True)
        if tokenizer.eos_token_id is None and self._config.get("alpacafarm_end_with_eos"):
            raise CheckpointError(
                f"{self.path}: the model was trained with an end-of-sequence token after each text "
                "(alpacafarm_end_with_eos), but its tokenizer has none. Is tokenizer_config.json damaged?"
            )
        return tokenizer

    @cached_property
    def _model(self) -> Any:
        import torch

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            kind = torch.device(device).type
        except RuntimeError as error:
            raise DataError(f"device: expected a name that torch knows, such as cpu, got {device!r}.") from error
        dtype = self.dtype or ("bfloat16" if kind == "cuda" else "float32")
        base = None if self._base is None else self._base()
        model = load_scorer(self.path, dtype=getattr(torch, dtype), base=base)
        self._pad: int | None = model.config.get_text_config().pad_token_id
        self._check_padding()
        _ = self._template, self._tokenizer  # all that is read once, read now
        if file_states(self.path) != self._files:
            raise CheckpointError(f"{self.path}: its files have changed since the oracle was made; make it once more.")
        return (model.to(device) if base is None else model).eval()

    def _check_padding(self) -> None:
        """The score is read at the last token that is no pad: by a plain template, EOS must be none.

        A chat template writes EOS itself, and a model trained elsewhere may have been trained to be read before it.
        """
        plain = not isinstance(self._template, ChatTemplate)
        if plain and self._pad is not None and self._pad == self._tokenizer.eos_token_id:
            raise CheckpointError(
                f"{self.path}: expected a pad_token_id that differs from the end-of-sequence token "
                f"({self._tokenizer.eos_token_id!r}), got {self._pad!r}. Set it in config.json."
            )

    @property
    def _limit(self) -> float:
        """Most tokens of a text: what was asked for, never more than the model has positions."""
        return min(self.max_length, num_positions(self._model.config))

    def _number(self, key: str, default: float, *, low: float = -math.inf) -> float:
        value = self._config.get(key, default)
        if value is not default and not (type(value) in (int, float) and low <= value < math.inf and value > -math.inf):
            raise CheckpointError(f"{self.path}: {key}: expected a finite number, {low:g} or more, got {value!r}.")
        return float(value)

    def _forward(self, rows: Sequence[list[int]], instructions: Sequence[str]) -> NDArray[np.float64]:
        import torch

        from ..last_layer import last_mlp_for_scores

        model, config = self._model, self._model.config.get_text_config()
        scores, pad = np.empty(len(rows)), self._pad
        if pad is None:  # then the score is read at the last token, so any that ends no text can fill up
            ends = {row[-1] for row in rows}
            pad = config.pad_token_id = next(token for token in range(len(ends) + 1) if token not in ends)
        at_once, device = tokens_at_once(model.device), model.device
        with torch.inference_mode():
            for shared, group in alike(rows, instructions, at_once if reads_in_parts(model) else math.inf):
                read = read_once(model, rows[group[0]][:shared])
                for part in batches([len(rows[row]) - shared for row in group], self.batch_size, at_once):
                    batch = [group[place] for place in part]
                    width = max(len(rows[row]) for row in batch)
                    padded = torch.tensor([rows[i][shared:] + [pad] * (width - len(rows[i])) for i in batch])
                    ids, lengths = padded.to(device), torch.tensor([len(rows[i]) for i in batch])
                    mask = (torch.arange(width) < lengths[:, None]).long()
                    inputs = {"input_ids": ids, "attention_mask": mask.to(device), **read(len(batch))}
                    with last_mlp_for_scores(model, ids):
                        logits = model(**inputs).logits
                    scores[batch] = logits[:, 0].double().cpu().numpy()
        return scores


def model_folder(name: str | PathLike[str]) -> Path:
    """The folder of that name, or that of a hub model's files on this machine; CheckpointError if there is neither."""
    path = Path(name).expanduser()
    return path if path.is_dir() or isinstance(name, PathLike) else snapshot(str(path))


def check_folder(path: Path) -> dict[str, Any]:
    """The config.json, or alpacafarm_reward.json, of a reward model's folder; CheckpointError if it is none of one."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a reward model's folder, found none.")
    adapter = is_adapter(path)
    config_file = path / (OWN_CONFIG if adapter else "config.json")
    config = {} if adapter and not config_file.exists() else read_json(config_file)  # of others' adapter there is none
    if not any(path.glob("*.safetensors")):
        files = sorted(file.name for file in path.iterdir())
        raise CheckpointError(f"{path}: expected weights as *.safetensors, found {files[:10]}. {PICKLED}")
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) and labels else config.get("num_labels", 2)
    if num_labels != 1 and not adapter:
        raise CheckpointError(
            f"{config_file}: a reward model gives one score (num_labels = 1), this one has {num_labels!r} labels. Is "
            "it a language model or a classifier?"
        )
    return config


def load_scorer(path: str | PathLike[str], *, dtype: torch.dtype, base: Any = None, trains: bool = False) -> Any:
    """Returns the model in a reward model's folder: a transformers model, or a `PeftModel` of one.

    `base` stands in for the model that an adapter names, and `trains` says whether the adapter will be trained. The
    head, where it is one linear layer, is float32. Raises CheckpointError for weights that are damaged or not all
    there, or are others than the base's.
    """
    if not is_adapter(path):
        return float32_head(load_model(KIND, path, dtype=dtype, local_files_only=True)[0])
    import peft

    if base is None:
        name, pad = adapter_base(path), load_tokenizer(path).pad_token_id
        if is_adapter(name):
            raise CheckpointError(
                f"{path}: its base {name} is an adapter itself; merge that one, and train anew on it."
            )
        base = float32_head(new_scorer(name, dtype=dtype, **({} if pad is None else {"pad_token_id": pad}))[0])
    with reading(path, "a reward model's LoRA adapter"):
        model = load_adapter(base, path, trains=trains)
        if not isinstance(getattr(model.get_base_model(), "score", None), peft.utils.ModulesToSaveWrapper):
            raise ValueError("it holds no head (modules_to_save: score)")
    return model


def new_scorer(name: str | PathLike[str], **options: Any) -> tuple[Any, bool]:
    """A model with one label made of any model's folder, or hub name, and whether its head is new: drawn at random."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    # Or it warns that the head is new, which is the point.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        model, lacking = load_model(KIND, name, new={"score.weight"}, num_labels=1, **options)
    finally:
        logging.set_verbosity(verbosity)
    return model, "score.weight" in lacking


def float32_head(model: Any) -> Any:
    """Has a linear head compute the score in float32, whatever the type of the model's other weights; the model."""
    import torch

    head: Any = getattr(model, "score", None)
    if isinstance(head, torch.nn.Linear):
        head.float()
        vars(head)["forward"] = MethodType(_linear_in_float32, head)
    return model


def _linear_in_float32(head: Any, x: Any) -> Any:
    import torch

    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.linear(x.float(), head.weight, head.bias)


def num_positions(config: Any) -> float:
    """How many positions a model knows, by its configuration; infinity if that does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def tokens_at_once(device: Any) -> int:
    """How many tokens, pads included, to put through a model at once where no gradients are wanted.

    On a CPU few: a small model's activations then stay in the cache, and rows of similar length have fewer pads.
    """
    return 2048 if device.type == "cpu" else 16_384


def cut_middle(tokens: list[int], limit: float) -> list[int]:
    """The tokens, or their first and last halves of `limit` in all if there are more."""
    if len(tokens) <= limit:
        return tokens
    kept = int(limit)
    return tokens[: kept // 2] + tokens[len(tokens) - (kept - kept // 2) :]


def batches(lengths: Sequence[int], max_rows: int, max_tokens: int) -> Iterator[list[int]]:
    """Yields the rows in batches of similar length, longest first, within `max_tokens` after padding."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batch and (len(batch) == max_rows or lengths[batch[0]] * (len(batch) + 1) > max_tokens):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
