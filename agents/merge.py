"""A LoRA adapter and its base as one whole model, which any library loads."""

from pathlib import Path
from typing import Any

import torch

from ..bases import adapter_base, adapter_task, is_adapter
from ..chat_templates import load_template
from ..errors import CheckpointError
from ..oracles.reward_model import check_folder, load_scorer
from ..pretrained import load_config, load_tokenizer
from .adapters import merge
from .language_model import LanguageModel
from .saving import save_files


def merge_folder(folder: str | Path, out: str | Path) -> None:
    """Writes the whole model that the adapter in `folder`, a policy's or a reward model's, and its base make.

    The adapter is added in float32, and the weights are saved in the type of the base's.

    Raises:
        CheckpointError: `folder` holds no adapter, its base is not there, or `out` has files.
        DataError: The folder has no prompt template.
    """
    if not is_adapter(folder):
        raise CheckpointError(f"{folder}: expected the folder of a LoRA adapter (adapter_config.json), found none.")
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise CheckpointError(f"{out}: expected a new or empty folder to write the whole model to, found files.")
    dtype = load_config(adapter_base(folder)).dtype or torch.float32
    facts = {"adapter": Path(folder).resolve().name, "merged": "in float32 by alpacafarm merge"}
    if adapter_task(folder) != "SEQ_CLS":
        LanguageModel.from_pretrained(folder, dtype=dtype).save(out, merged=True, facts=facts)
        return
    tokenizer, settings = load_tokenizer(folder), check_folder(Path(folder))
    model: Any = merge(load_scorer(folder, dtype=dtype))
    for name, value in settings.items():
        setattr(model.config, name, value)
    ends = settings.get("alpacafarm_end_with_eos", True)
    save_files(out, model, tokenizer, load_template(folder, tokenizer), eos=ends, facts=facts)
