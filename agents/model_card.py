"""The model card of a saved folder, its README.md: what made the model, from what, how it fared, how to load it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..bases import ADAPTER_CONFIG, is_adapter, may_be_hub_name
from ..data.files import write_atomic

TEMPLATE = Path(__file__).with_name("model_card.md.j2")


def write_card(folder: Path, base: str | Path, facts: Mapping[str, Any]) -> None:
    """Writes the README.md of a model's folder; `facts` are the rows of its table, beside the base.

    Of a folder on this machine, such as the base's, it tells the last part alone.
    """
    adapter = is_adapter(folder)
    config = json.loads((folder / (ADAPTER_CONFIG if adapter else "config.json")).read_text(encoding="utf-8"))
    scores = config.get("task_type") == "SEQ_CLS" or "SequenceClassification" in str(config.get("architectures"))
    rows = {"base": public_name(base), **facts} if base else facts
    on_hub = may_be_hub_name(str(base)) and not Path(base).is_dir()
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-classification" if scores else "text-generation",
        base_model=str(base) if on_hub else None,
        tags=["alpacafarm-env", *["lora"] * adapter, *["reward-model"] * scores],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        adapter=adapter,
        scores=scores,
        loader=f"Auto{'Peft' * adapter}ModelFor{'SequenceClassification' if scores else 'CausalLM'}",
        rows={name: _cell(value) for name, value in rows.items()},
    )
    write_atomic(folder / "README.md", card.content)


def _cell(value: Any) -> str:
    text = ", ".join(f"{name} {each}" for name, each in value.items()) if isinstance(value, Mapping) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def public_name(model: str | Path) -> str:
    """A hub name as it is, and of a folder, which others do not have, its last part."""
    return Path(model).resolve().name if Path(model).is_dir() else str(model)
