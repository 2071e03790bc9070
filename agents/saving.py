"""Model folders as the agents write them: whole, equal bytes for equal models, and readable by other libraries.

Each has a model card, its README.md: what made the model, from what, how it fared, how to load it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import peft
from transformers import PreTrainedTokenizerBase

from ..bases import ADAPTER_CONFIG, BASE_FILE, is_adapter, may_be_hub_name, name_base, read_json
from ..chat_templates import chat_template, ids_around
from ..data.files import write_atomic
from ..templates import FILE_NAME, PromptTemplate
from .checkpoints import write_json, writing
from .prompts import control_tokens

TEMPLATE = Path(__file__).with_name("model_card.md.j2")
FORM_FILES = ("config.json", "model.safetensors", ADAPTER_CONFIG, "adapter_model.safetensors", BASE_FILE)
"""Files of a whole model, and of an adapter: a folder holds one of them."""
LOADING_STATE = ("is_local", "local_files_only", "name_or_path")
"""Settings that transformers keeps among a tokenizer's settings although it says how, and from where, it was loaded."""


def save_files(
    folder: str | Path,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    template: PromptTemplate,
    *,
    eos: bool = True,
    extra: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model folder: every file is complete before it gets its final name.

    The bytes do not depend on how the tokenizer was loaded, and files are as readable as the umask permits. The
    tokenizer gets a `chat_template` for the same prompt; `eos` says whether an answer ends with EOS there. `extra` has
    JSON files beside, by name, and `facts` what the model card says of the training. An adapter names its base so that
    it is found from any directory.
    """
    target, adapted = Path(folder), isinstance(model, peft.PeftModel)
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
    with writing(target), tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        # peft would save a whole table of embeddings where it has grown by control tokens, whose rows the adapter has.
        options = {"save_embedding_layers": False} if adapted and control_tokens(model) else {}
        files = {**(extra or {}), **(name_base(model.active_peft_config, target) if adapted else {})}
        model.save_pretrained(beside, **options)
        own, tokenizer.chat_template = tokenizer.chat_template, chat_template(template, tokenizer, eos=eos)
        try:
            tokenizer.save_pretrained(beside)
        finally:
            tokenizer.chat_template = own
        _strip_loading_state(Path(beside) / "tokenizer_config.json")
        template.save(beside)
        for name, content in files.items():
            write_json(Path(beside) / name, content)
        write_card(Path(beside), model.name_or_path, facts or {})
        # An older file would render another prompt, or make a whole model an adapter.
        for name in (FILE_NAME, "chat_template.jinja", *FORM_FILES):
            if not (Path(beside) / name).is_file():
                (target / name).unlink(missing_ok=True)
        mode = _default_mode(Path(beside))
        for path in sorted(Path(beside).rglob("*")):
            if path.is_file():
                place = target / path.relative_to(beside)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.chmod(mode)  # safetensors makes its file private
                path.replace(place)


def end_texts(tokenizer: Any, wanted: bool | None) -> None:
    """Makes a tokenizer end every text with EOS, or not, if its kind can do that; None: makes it add nothing at all.

    A reward model whose score is read at EOS then reads the same in any library that has its tokenizer. Nothing is
    added for a chat template that writes all there is: a conversation that another library renders and then tokenizes
    would begin with two BOS otherwise.
    """
    front, behind = ids_around(tokenizer)
    now = bool(front), bool(behind) and behind == [tokenizer.eos_token_id]
    then = (False, False) if wanted is None else (now[0], wanted)
    own = front in ([], [tokenizer.bos_token_id]) and (wanted is not None or now[1] or not behind)
    if own and now != then and hasattr(tokenizer, "update_post_processor"):
        tokenizer.add_bos_token, tokenizer.add_eos_token = then


def _strip_loading_state(config: Path) -> None:
    content = json.loads(config.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in LOADING_STATE}
    config.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _default_mode(folder: Path) -> int:
    """rw-r--r-- less the umask; asked of a new file, since reading the umask would set it."""
    probe = folder / ".mode"
    probe.touch(mode=0o644)
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    return mode


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
