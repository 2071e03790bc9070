"""The model card of a saved folder, its README.md: what made the model, from what, how it fared, how to load it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from ..bases import ADAPTER_CONFIG, is_adapter, may_be_hub_name, read_json
from ..data.files import write_atomic

TEMPLATE = Path(__file__).with_name("model_card.md.j2")


def write_card(folder: Path, base: str | Path, facts: Mapping[str, Any]) -> None:
    """Writes the README.md of a model's folder; `facts` are the rows of its table, beside the base.

    Of a folder on this machine, such as the base's, it tells the last part alone.
    """
    adapter = is_adapter(folder)
    config = read_json(folder / (ADAPTER_CONFIG if adapter else "config.json"))
    scores = config.get("task_type") == "SEQ_CLS" or "SequenceClassification" in str(config.get("architectures"))
    rows = {"base": public_name(base), **facts} if base else facts
    on_hub = may_be_hub_name(str(base)) and not Path(base).is_dir()
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"))
    card = template.render(adapter=adapter, scores=scores, hub_base=base if on_hub else None, rows=rows)
    write_atomic(folder / "README.md", card + "\n")


def public_name(model: str | Path) -> str:
    """A hub name as it is, and of a folder, which others do not have, its last part."""
    return Path(model).resolve().name if Path(model).is_dir() else str(model)
