"""Fixtures of the agents' tests: language models on two architectures, and saved folders."""

from pathlib import Path

import pytest
import torch
from tiny_worlds import BUILDERS, TEMPLATE, build_llama, build_tokenizer
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from alpacafarm_env.agents.language_model import LanguageModel


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def llama(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    return LanguageModel(build_llama(len(tokenizer)), tokenizer, TEMPLATE, max_response_tokens=16)


@pytest.fixture(params=sorted(BUILDERS))
def language_model(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """The same tests on two architectures."""
    return LanguageModel(BUILDERS[request.param](len(tokenizer)), tokenizer, TEMPLATE, max_response_tokens=16)


@pytest.fixture
def policy_folder(llama: LanguageModel, tmp_path: Path) -> Path:
    """A saved policy: config.json, model.safetensors, tokenizer.json, prompt_template.json."""
    llama.save(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture
def reward_model_folder(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """A saved reward model (one label) with the policy's tokenizer and template."""
    folder = tmp_path / "reward_model"
    torch.manual_seed(1)
    config = build_llama(len(tokenizer)).config
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    TEMPLATE.save(folder)
    return folder
