"""Model folders that are damaged or bring code along: one error that names the folder, and no code is run."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from peft import LoraConfig

from alpacafarm_env.agents import LanguageModel, RewardModeling
from alpacafarm_env.agents.value_model import ValueModel
from alpacafarm_env.errors import AlpacaFarmError, CheckpointError
from alpacafarm_env.instructions import Instruction, Preference
from alpacafarm_env.oracles.reward_model import RewardModel
from alpacafarm_env.pretrained import load_config, load_tokenizer

PAIRS = [Preference(Instruction("Hi"), ("Hello", "No"), 1)]
AUTO_MAP = {
    "AutoConfig": "code.Config",
    "AutoModelForCausalLM": "code.Model",
    "AutoModelForSequenceClassification": "code.Model",
    "AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"],
}


def step(**options: Any) -> None:
    env = gym.make("AlpacaFarm-PPO-v0", dataset="sandbox", **options)
    env.reset(seed=0)
    env.step("Sure.")


READERS: dict[str, Callable[[Path, LanguageModel], object]] = {
    "policy": lambda folder, _: LanguageModel.from_pretrained(folder),
    "value": lambda folder, llama: ValueModel.from_pretrained(folder, policy=llama),
    "reward_modeling": lambda folder, _: RewardModeling(folder, PAIRS),
    "reward_model": lambda folder, _: RewardModel(folder).score(["Hi"], ["Hello"]),
    "environment": lambda folder, _: step(oracle={"reward_model": folder}),
    "token_environment": lambda folder, _: gym.make("AlpacaFarm-Token-v0", tokenizer=str(folder)),
    "config": lambda folder, _: load_config(folder),
    "tokenizer": lambda folder, _: load_tokenizer(str(folder)),
}
TOKENIZER, CONFIG = ("tokenizer.json", "tokenizer_config.json"), ("config.json",)
READ_BY = {"token_environment": TOKENIZER, "tokenizer": TOKENIZER, "config": CONFIG}
"""Of those that do not read all files."""


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("reader", READERS)
def test_code_in_a_model_folder_is_never_run(
    reward_model_folder: Path, llama: LanguageModel, reader: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not even when whoever is asked says yes."""
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    (reward_model_folder / "code.py").write_text(code)
    edit(reward_model_folder / "config.json", auto_map=AUTO_MAP, model_type="unheard_of", architectures=["Unheard"])
    edit(reward_model_folder / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Unheard")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(AlpacaFarmError, match="policy|reward_model"):
        READERS[reader](reward_model_folder, llama)
    assert not ran.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"null", b"\xff"], ids=repr)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"])
def test_a_damaged_file_is_one_error_that_names_the_folder(
    reward_model_folder: Path, llama: LanguageModel, name: str, content: bytes
) -> None:
    (reward_model_folder / name).write_bytes(content)
    for reader, read in READERS.items():
        if name not in READ_BY.get(reader, (name,)):
            continue
        with pytest.raises(AlpacaFarmError) as raised:
            read(reward_model_folder, llama)
        assert str(reward_model_folder) in str(raised.value), reader


def test_a_tokenizer_that_has_lost_its_special_tokens_is_refused_by_name(
    reward_model_folder: Path, llama: LanguageModel
) -> None:
    """A reward model that was trained with an end of sequence would give other scores without it, silently."""
    (reward_model_folder / "tokenizer_config.json").write_text("{}")
    edit(reward_model_folder / "config.json", alpacafarm_end_with_eos=True)
    for reader in ("policy", "reward_modeling", "reward_model", "token_environment"):
        with pytest.raises(AlpacaFarmError) as raised:
            READERS[reader](reward_model_folder, llama)
        assert str(reward_model_folder) in str(raised.value), reader


def test_weights_that_the_file_lacks_are_not_drawn_at_random(policy_folder: Path) -> None:
    file = policy_folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"model.norm.weight", b"model.form.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        LanguageModel.from_pretrained(policy_folder)


def test_a_reward_model_is_no_policy(reward_model_folder: Path, policy_folder: Path, tmp_path: Path) -> None:
    for tied in (False, True):  # then its embeddings would serve as the head that it lacks
        edit(reward_model_folder / "config.json", tie_word_embeddings=tied)
        with pytest.raises(CheckpointError, match="a reward model"):
            LanguageModel.from_pretrained(reward_model_folder)
    adapter = LanguageModel.from_pretrained(policy_folder, lora=LoraConfig(r=1, target_modules=["q_proj"]))
    adapter.save(tmp_path / "adapter")
    LanguageModel.from_pretrained(tmp_path / "adapter")
    edit(tmp_path / "adapter" / "adapter_config.json", task_type="SEQ_CLS")
    with pytest.raises(CheckpointError, match="the adapter of a reward model"):
        LanguageModel.from_pretrained(tmp_path / "adapter")


def damage(content: bytes) -> Callable[[bytes], bytes]:
    return lambda _: content


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        *(("adapter_config.json", damage(x)) for x in (b"", b"[]", b"{", b"{}", b'{"base_model_name_or_path": 1}')),
        *(("adapter_model.safetensors", damage(x)) for x in (b"", b"[]")),
        ("adapter_model.safetensors", lambda x: x.replace(b"layers.1.mlp.up_proj", b"layers.1.mlp.up_prop")),
    ],
)
def test_a_damaged_adapter_is_one_error_that_names_the_folder(
    policy_folder: Path, tmp_path: Path, name: str, damaged: Callable[[bytes], bytes]
) -> None:
    """One without some of its matrices too."""
    LanguageModel.from_pretrained(policy_folder, lora=LoraConfig(r=2, target_modules="all-linear")).save(tmp_path / "x")
    file = tmp_path / "x" / name
    file.write_bytes(damaged(file.read_bytes()))
    with pytest.raises(CheckpointError, match=str(tmp_path / "x")):
        LanguageModel.from_pretrained(tmp_path / "x")
