"""Tiny random models and a data folder on disk: a user's own, as the benchmark commands take them."""

import json
from pathlib import Path

import pytest
from hub_models import build_byte_tokenizer


@pytest.fixture(scope="session")
def own_data(tmp_path_factory) -> Path:
    """A folder with sixteen instructions in each of unlabeled, val and eval; eval and val have outputs."""
    folder = tmp_path_factory.mktemp("data")
    for split in ("unlabeled", "val", "eval"):
        inputs = [f"line {i}" if i % 3 == 0 else "" for i in range(16)]
        rows = [
            {"instruction": f"Say {split} {i} <b>now</b>.", "input": text, "output": f"Yes {i}."}
            for i, text in enumerate(inputs)
        ]
        (folder / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def own_models(tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a policy and a reward model of one layer with random weights and one byte-level tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from alpacafarm_env.templates import PromptTemplate

    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = build_byte_tokenizer(*special.values(), bos=False, **special)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        num_labels=1,
    )
    folder = tmp_path_factory.mktemp("models")
    for name, kind in (("policy", LlamaForCausalLM), ("reward_model", LlamaForSequenceClassification)):
        torch.manual_seed(0)
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        PromptTemplate("Q: {instruction}\nIn: {input}\nA:", "Q: {instruction}\nA:").save(folder / name)
    return folder / "policy", folder / "reward_model"


@pytest.fixture
def options(own_data, own_models, tmp_path):
    """The win-rate curve of one short step of eight responses, one seed, in this process."""
    from alpacafarm_env.benchmarks.win_rate_curve.__main__ import WinRateCurveOptions

    return WinRateCurveOptions(
        out=tmp_path / "out",
        seeds=1,
        data=str(own_data),
        policy=str(own_models[0]),
        reward_model=str(own_models[1]),
        preset="sandbox",
        rollout_batch_size=8,
        minibatch_size=4,
        steps=1,
        evaluate_every=1,
        num_val=4,
        num_eval=9,
        processes=1,
    )
