"""Model folders between libraries: equal scores and prompts in plain transformers; damage and code are refused."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hub_models import ENDS, FAMILIES, build_hub_folder
from peft import LoraConfig
from tiny_worlds import TEMPLATE, TEXTS, build_llama, generator
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

from alpacafarm_env import sandbox
from alpacafarm_env.agents import LanguageModel, RewardModeling, RewardModelingConfig
from alpacafarm_env.agents.rollouts import ragged_split
from alpacafarm_env.agents.value_model import ValueModel
from alpacafarm_env.chat_templates import ChatTemplate
from alpacafarm_env.envs.token import TokenEnv
from alpacafarm_env.errors import AlpacaFarmError, CheckpointError, DataError
from alpacafarm_env.instructions import Instruction, Preference
from alpacafarm_env.oracles import RewardModel, make_oracle
from alpacafarm_env.pretrained import load_config, load_tokenizer
from alpacafarm_env.templates import ALPACA, FILE_NAME, PromptTemplate

pytestmark = pytest.mark.filterwarnings("ignore:The tokenizer has:UserWarning")
VAL = sandbox.SANDBOX.instructions("val")[:24]
SHIPPED = [sandbox.REWARD_MODEL, sandbox.REWARD_MODEL_CLEAN]
PAIRS = [Preference(Instruction(ask), ("Yes.", "No, it is not."), 1 + len(ask) % 2) for ask in ("Hi", "What?", "Sing")]


@pytest.fixture(scope="module")
def answers() -> list[str]:
    policy = LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=64)
    return list(policy.generate(VAL, generator=generator()).texts)


def plain_scores(folder, encode, rows) -> list[float]:
    """Scores of another library that knows nothing of ours but the calibration in config.json."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    mean = getattr(model.config, "alpacafarm_reward_mean", 0.0)
    std = getattr(model.config, "alpacafarm_reward_std", 1.0)
    with torch.no_grad():
        return [(model(**encode(tokenizer, *row)).logits.item() - mean) / std for row in rows]


def as_text(tokenizer, prompt, answer):
    return tokenizer(prompt + answer, return_tensors="pt")


def as_messages(tokenizer, ask, answer):
    messages = [{"role": "user", "content": str(ask)}, {"role": "assistant", "content": answer}]
    return tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)


def resave(kind, folder, target):
    """What another library leaves of a folder: `save_pretrained` of the model and of the tokenizer."""
    kind.from_pretrained(folder).save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return target


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_reward_models_score_alike_in_plain_transformers(folder, answers):
    expected = pytest.approx(RewardModel(folder).score(VAL, answers).tolist(), abs=1e-5)
    template = PromptTemplate.load(folder)
    rendered = [(template.render(ask), answer) for ask, answer in zip(VAL, answers, strict=True)]
    assert plain_scores(folder, as_text, rendered) == expected
    assert plain_scores(folder, as_messages, zip(VAL, answers, strict=True)) == expected


@pytest.mark.parametrize("eos", [True, False])
def test_trained_reward_models_score_alike_in_plain_transformers(policy_folder, tmp_path, eos):
    folder = tmp_path / "reward"
    agent = RewardModeling(policy_folder, PAIRS, config=RewardModelingConfig(end_with_eos=eos, batch_size=3))
    agent.learn()
    agent.save(folder)
    asks, answers = ["Hi", "</s> or <pad>", "Why?"], ["Yes.", "", " No\n"]
    scores = agent.score(asks, answers)
    assert RewardModel(folder).score(asks, answers).tolist() == pytest.approx(scores.tolist(), abs=1e-5)
    text = [(TEMPLATE.render(asks[row]), answers[row]) for row in (0, 2)]
    assert plain_scores(folder, as_text, text) == pytest.approx(scores[[0, 2]].tolist(), abs=1e-5)
    chat = [(asks[row], answers[row]) for row in (0, 2)]
    assert plain_scores(folder, as_messages, chat) == pytest.approx(scores[[0, 2]].tolist(), abs=1e-5)
    # The other way round, from a tokenizer that does the opposite.
    again = RewardModeling(folder, PAIRS, config=RewardModelingConfig(end_with_eos=not eos))
    eos_id, rows = again.tokenizer.eos_token_id, again._encode(["Hi"], ["Yes."])
    assert rows[0].count(eos_id) == (not eos)
    assert again.tokenizer("Hi")["input_ids"].count(eos_id) == (not eos)
    assert again.tokenizer("Hi")["input_ids"][0] == again.tokenizer.bos_token_id


def test_the_shipped_policy_without_its_template_answers_the_same(tmp_path):
    resave(AutoModelForCausalLM, sandbox.POLICY, tmp_path / "policy")
    assert not (tmp_path / "policy" / FILE_NAME).exists()
    policies = [
        LanguageModel.from_pretrained(folder, max_response_tokens=64)
        for folder in (sandbox.POLICY, tmp_path / "policy")
    ]
    ours, theirs = (policy.generate(VAL, generator=generator(1)).texts for policy in policies)
    assert theirs == ours
    assert sandbox.gold_oracle().score(VAL, theirs).mean() > 4


ASKS = ("List two birds.", "What is it?", "Sing")


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def folder(family, tmp_path):
    """An instruct model as a hub has it."""
    return build_hub_folder(family, tmp_path / "hub")


def library_ids(tokenizer, ask, *answer, **options) -> list[int]:
    messages = [{"role": "user", "content": str(ask)}, *({"role": "assistant", "content": text} for text in answer)]
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def test_a_policy_reads_the_librarys_prompts_and_scores_what_it_samples(folder):
    policy = LanguageModel.from_pretrained(folder, max_response_tokens=24)
    expected = [library_ids(policy.tokenizer, ask, add_generation_prompt=True) for ask in ASKS]
    assert policy.encode_prompts(ASKS) == expected
    samples = policy.generate(ASKS, generator=generator(), num_samples=8)
    assert [row.tolist() for row in ragged_split(samples.prompt_tokens, samples.prompt_lengths)][::8] == expected
    torch.testing.assert_close(policy.logprobs(samples), samples.logprobs, atol=1e-4, rtol=0)


def test_every_listed_end_ends_a_response_and_the_turns_end_is_trained(folder, family):
    policy = LanguageModel.from_pretrained(folder, max_response_tokens=60)
    ids = policy.tokenizer.convert_tokens_to_ids(ENDS[family])
    assert list(policy.eos_token_ids) == ids
    assert [row[-1] for row in policy.encode_responses(["The robin", "sings"])] == [ids[0]] * 2
    samples = policy.generate(ASKS, generator=generator(), num_samples=64)
    rows = [row.tolist() for row in ragged_split(samples.tokens, samples.lengths)]
    finished = samples.finished.tolist()
    assert {row[-1] for row, ended in zip(rows, finished, strict=True) if ended} == set(ids)
    assert not any(token in ids for row in rows for token in row[:-1])


def test_a_saved_policy_keeps_its_chat_template(folder, tmp_path):
    policy = LanguageModel.from_pretrained(folder)
    ALPACA.save(tmp_path / "again")  # of another model that was there
    policy.save(tmp_path / "again")
    again = LanguageModel.from_pretrained(tmp_path / "again")
    assert isinstance(again.template, ChatTemplate)
    assert again.encode_prompts(ASKS) == policy.encode_prompts(ASKS)
    named = LanguageModel.from_pretrained(folder, template="alpaca")
    named.save(tmp_path / "named")
    (tmp_path / "named" / FILE_NAME).unlink()  # as another library would leave it
    unnamed = LanguageModel.from_pretrained(tmp_path / "named")
    assert unnamed.encode_prompts(ASKS) == named.encode_prompts(ASKS) != policy.encode_prompts(ASKS)


@pytest.mark.parametrize("eos", [True, False])
def test_a_reward_model_reads_the_librarys_conversation(folder, tmp_path, eos):
    pairs = [Preference(Instruction(ask), ("The robin", "the wren sings"), 1 + i % 2) for i, ask in enumerate(ASKS)]
    config = RewardModelingConfig(batch_size=3, end_with_eos=eos)  # which is for texts that no chat template ends
    agent = RewardModeling(folder, pairs, config=config)
    agent.learn()
    agent.save(tmp_path / "reward")
    asks, answers = [*ASKS, Instruction("Sum up.", "It sings.")], ["The robin", " the wren ", "No", "What?"]
    pairs = zip(asks, answers, strict=True)
    expected = pytest.approx(plain_scores(tmp_path / "reward", as_messages, pairs), abs=1e-5)
    assert agent.score(asks, answers).tolist() == expected
    assert RewardModel(tmp_path / "reward").score(asks, answers).tolist() == expected


def test_the_token_environment_speaks_the_chat_template(folder, family):
    env = TokenEnv(tokenizer=folder, oracle="constant", max_response_tokens=4)
    observation, _ = env.reset(options={"instruction_id": env.instructions[0].id})
    length = int(observation["attention_mask"].sum())
    asked = library_ids(env.tokenizer, env.instructions[0], add_generation_prompt=True)
    assert observation["input_ids"][:length].tolist() == asked
    _, _, terminated, _, _ = env.step(env.tokenizer.convert_tokens_to_ids(ENDS[family][0]))
    assert terminated


def test_nothing_is_guessed_where_there_is_no_template(tokenizer, tmp_path):
    policy, reward = tmp_path / "policy", tmp_path / "reward"
    config = build_llama(len(tokenizer)).config
    config.num_labels = 1
    for folder, model in ((policy, build_llama(len(tokenizer))), (reward, LlamaForSequenceClassification(config))):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    data = [Preference(Instruction("Hi"), ("a", "b"), 1)]
    for load in (
        lambda **named: LanguageModel.from_pretrained(policy, **named).template,
        lambda **named: RewardModeling(policy, data, **named).template,
        lambda **named: RewardModel(reward, **named)._template,
        lambda **named: TokenEnv(tokenizer=policy, **named).template,
        lambda **named: make_oracle({"reward_model": str(reward), **named}, dataset=None)._template,
    ):
        with pytest.raises(DataError, match="template="):
            load()
        assert load(template="alpaca") == ALPACA
        assert load(template=TEMPLATE) == TEMPLATE


ANSWERS = ("The robin", " the wren \n", "", "No.", "What is it? [INST]")


@pytest.mark.parametrize(
    ("family", "pad"), [("qwen", "<|endoftext|>"), ("llama-3", None), ("llama-3", "<|eot_id|>"), ("mistral", "</s>")]
)
def test_a_reward_model_of_a_hub_scores_as_its_card_computes_it(family, pad, tmp_path):
    """Without a padding token, with one, and with one that hides the conversation's last token."""
    folder = build_hub_folder(family, tmp_path / "reward", reward=True)
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    config.pad_token_id = tokenizer.convert_tokens_to_ids(pad) if pad else None
    config.save_pretrained(folder)
    expected = plain_scores(folder, as_messages, zip(TEXTS, ANSWERS, strict=True))
    assert np.std(expected) > 0.1
    assert RewardModel(folder).score(TEXTS, ANSWERS).tolist() == pytest.approx(expected, abs=1e-5)


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
