"""Rebuilds everything that the sandbox ships, from its seed, and says whether the result equals what is shipped.

    python -m alpacafarm_env.benchmarks.build_sandbox [--out DIR] [--install]

Stages: texts (instructions, references), the SFT10k policy, pairs of its samples, and two reward models on those pairs:
the surrogate (labels of p_sim^ann, 25 % flips) and a clean one (gold's own labels).
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import tyro

from .. import sandbox
from ..agents import SFT, LanguageModel, RewardModelingConfig, SFTConfig
from ..agents.saving import save_files
from ..data.files import write_atomic
from ..errors import AlpacaFarmError
from ..sandbox import dataset as texts
from ..sandbox.tokenizer import build as build_tokenizer
from ..templates import PromptTemplate
from .experiment.reward_models import fit, sample
from .harness.study import run_command, versions

TEMPLATE = PromptTemplate(with_input="{instruction}\n\n{input}\nResponse:", without_input="{instruction}\nResponse:")
"""Shorter than Alpaca's: the sandbox's models read 20 tokens where a 7B model reads 60."""
ARCHITECTURE: Final[dict[str, Any]] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
REWARD_MODELS = {"reward_model": "sim_ann", "reward_model_clean": "gold"}
"""Folder -> the judge that labels its preferences."""
MANIFEST: Final = "manifest.json"


@dataclass(frozen=True)
class BuildOptions:
    """Options of the rebuild."""

    out: Path = Path("results/build_sandbox")
    """A new folder for the result and the training logs."""
    install: bool = False
    """Put the result into the package, in place of what is shipped."""


def build_texts(folder: Path) -> None:
    """Instructions of all splits, and the stored outputs of the stand-in for Davinci003 on eval."""
    for split, rows in texts.generate().items():
        records = [{"instruction": row.instruction, "input": row.input} for row in rows]
        if split == "eval":
            records = [{**record, "dataset": row.source} for record, row in zip(records, rows, strict=True)]
            name, outputs = "davinci003_stand_in", map(texts.reference, rows)
            pairs = zip(records, outputs, strict=True)
            stand_in = [{**record, "output": output, "generator": name} for record, output in pairs]
            texts.write_rows(folder / f"{name}.jsonl.gz", stand_in)
        texts.write_rows(folder / f"{split}.jsonl.gz", records)


def initial_model(folder: Path) -> None:
    """A LLaMA with random weights and the sandbox's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    torch.manual_seed(texts.SEED)  # transformers initialises from the global generator; nothing else here reads it
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        **ARCHITECTURE,
    )
    save_files(folder, LlamaForCausalLM(config), tokenizer, TEMPLATE)


def build_policy(data: texts.Sandbox, folder: Path, work: Path) -> None:
    """SFT10k: trained from scratch on the crowd's demonstrations."""
    initial_model(work / "initial")
    policy = LanguageModel.from_pretrained(work / "initial")
    sft = SFT(policy, data.demonstrations("sft"), config=SFTConfig.sandbox(), seed=texts.SEED, out=work / "sft")
    print(f"  SFT: loss {sft.learn().get('loss', float('nan')):.3f} nats a token", flush=True)
    sft.save(folder)


def build_pairs(data: texts.Sandbox, policy: Path, file: Path) -> None:
    """Two samples of the policy at temperature 1 for each instruction of `preference`."""
    model = LanguageModel.from_pretrained(policy, max_response_tokens=64)
    rows = sample(model, data.instructions("preference"), "pairs", num_samples=2)
    texts.write_rows(file, [{"output_1": a, "output_2": b} for a, b in zip(rows[::2], rows[1::2], strict=True)])


def build_reward_model(out: Path, name: str) -> None:
    """Trains the reward model `name` on the pairs as its judge labels them; 0 is an SFT response's mean score."""
    data, target = texts.Sandbox(out / "assets" / "data"), out / "assets" / name
    metrics = fit(
        out / "assets" / "policy",
        data.preferences(judge=sandbox.judge(REWARD_MODELS[name])),
        target,
        val=data.instructions("val"),
        config=RewardModelingConfig.sandbox(),
        seed=texts.SEED,
        out=out / "work" / name,
    )
    loss, mean, std = metrics.get("loss", float("nan")), metrics["sft/mean"], metrics["sft/std"]
    print(f"  {name}: loss {loss:.3f}, SFT scores {mean:.2f} +- {std:.2f}", flush=True)


def settings() -> dict[str, Any]:
    """All that decides the assets, sources aside."""
    return {
        "seed": texts.SEED,
        "architecture": ARCHITECTURE,
        "sft": asdict(SFTConfig.sandbox()),
        "reward_modeling": asdict(RewardModelingConfig.sandbox()),
        "versions": versions(),
    }


def build(out: Path) -> Path:
    """Runs every stage; returns the folder of assets.

    Raises:
        AlpacaFarmError: There are assets in `out` already.
    """
    torch.set_num_threads(1)  # with more, sums are rounded otherwise: other bytes
    assets, work = out / "assets", out / "work"
    if assets.exists():
        raise AlpacaFarmError(f"--out: expected a new folder, got {out}, which has assets. Give another.")
    data, policy = texts.Sandbox(assets / "data"), assets / "policy"
    stages: dict[str, Callable[[], None]] = {
        "texts": lambda: build_texts(assets / "data"),
        "policy": lambda: build_policy(data, policy, work),
        "pairs": lambda: build_pairs(data, policy, assets / "data" / "pairs.jsonl.gz"),
        **{name: partial(build_reward_model, out, name) for name in REWARD_MODELS},
    }
    for number, (name, stage) in enumerate(stages.items(), start=1):
        start = time.monotonic()
        print(f"[{number}/{len(stages)}] {name} ...", flush=True)
        stage()
        print(f"[{number}/{len(stages)}] {name}: {time.monotonic() - start:.0f} s", flush=True)
    write_manifest(assets)
    return assets


def hashes(assets: Path) -> dict[str, str]:
    """File -> SHA-256 of every asset but the manifest."""
    files = sorted(path for path in assets.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(assets).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_manifest(assets: Path) -> None:
    """How the assets came about, with their hashes and the command that rebuilds them."""
    command = "python -m alpacafarm_env.benchmarks.build_sandbox --install"
    made = {"sizes": texts.SIZES, "labels": REWARD_MODELS, "files": hashes(assets)}
    write_atomic(assets / MANIFEST, json.dumps({"command": command, **settings(), **made}, indent=2) + "\n")


def compare(assets: Path, shipped: Path) -> list[str]:
    """The files that differ from the shipped ones, or are in one folder only."""
    ours, theirs = hashes(assets), hashes(shipped)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def install(assets: Path, shipped: Path) -> None:
    """Replaces the shipped assets by a copy of these."""
    beside = shipped.with_name(f".{shipped.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(assets, beside)
    shutil.rmtree(shipped)
    beside.rename(shipped)


def build_and_compare(options: BuildOptions) -> int:
    """Builds, compares with what is shipped, installs if asked; exit status 0 when equal or installed."""
    assets = build(options.out)
    different = compare(assets, texts.ASSETS)
    print(f"Built {len(hashes(assets))} files: {assets}")
    print(f"{len(different)} files differ from the shipped sandbox{': ' if different else '.'}{', '.join(different)}")
    if different:
        print("(Weights depend on the processor's rounding: another kind of machine gives other bytes.)")
    if options.install:
        install(assets, texts.ASSETS)
        print(f"Installed into {texts.ASSETS}")
    return 0 if options.install or not different else 1


def main(args: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    prog = "python -m alpacafarm_env.benchmarks.build_sandbox"
    options = tyro.cli(BuildOptions, args=args, description=__doc__, prog=prog)
    return run_command(lambda: build_and_compare(options))


if __name__ == "__main__":
    sys.exit(main())
