"""Tokens that end, pad and condition texts, and reward conditioning, which learns by them."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hub_models import build_byte_tokenizer
from tiny_worlds import (
    BUILDERS,
    INSTRUCTIONS,
    LORA,
    TEMPLATE,
    TEXTS,
    build_gpt2,
    build_llama,
    build_tokenizer,
    generator,
    load_policy,
)
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.prompts import (
    control_tokens,
    own_control_token,
)
from alpacafarm_env.agents.sft import NEGATIVE, POSITIVE, BinaryRewardConditioning, RewardConditioningConfig
from alpacafarm_env.chat_templates import ChatTemplate
from alpacafarm_env.instructions import Demonstration, Instruction, Preference

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MEDIA, RESERVED, FINETUNE = "<|image_pad|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"


def build(*names, chat_template=CHATML, **named):
    """One token a byte, after ChatML's and `names`; `named` are roles."""
    special = ["</s>", "<|im_start|>", "<|im_end|>", *names]
    tokenizer = build_byte_tokenizer(*special, bos=False, **{"eos_token": "</s>", **named})
    tokenizer.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    tokenizer.chat_template = chat_template
    return tokenizer


def policy_of(tokenizer, *, free_rows=0, **settings):
    model = build_llama(len(tokenizer) + free_rows, **settings)
    return LanguageModel(model, tokenizer, ChatTemplate.of(tokenizer) if tokenizer.chat_template else TEMPLATE)


@pytest.mark.parametrize(
    ("names", "named", "free_rows", "expected"),
    [
        ([RESERVED, FINETUNE], {}, 0, FINETUNE),
        ([MEDIA, RESERVED, "<unk>"], {"unk_token": "<unk>"}, 1, RESERVED),
        ([MEDIA, "<odd>", "<unk>"], {"unk_token": "<unk>"}, 1, "<unk>"),
        ([MEDIA, "<odd>"], {"unk_token": "</s>"}, 1, "<pad>"),
        ([MEDIA, "<odd>"], {}, 0, "<odd>"),
        (["<odd>"], {"pad_token": "</s>"}, 0, "<odd>"),
        (["<odd>"], {"pad_token": "<|im_end|>"}, 0, "<odd>"),  # it ends a turn
        (["<odd>"], {"pad_token": "</s>", "chat_template": None}, 0, "<|im_start|>"),
        ([FINETUNE, "<odd>"], {"chat_template": f"{FINETUNE}{CHATML}"}, 0, "<odd>"),  # it is part of the prompt
    ],
)
def test_a_padding_token_that_ends_no_response_is_chosen_and_saved(names, named, free_rows, expected, tmp_path):
    tokenizer = build(*names, **named)
    known = len(tokenizer)
    with pytest.warns(UserWarning, match="takes its place"):
        policy = policy_of(tokenizer, free_rows=free_rows)
    assert tokenizer.pad_token == expected
    assert len(tokenizer) == known + (expected == "<pad>")
    policy.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LanguageModel.from_pretrained(tmp_path)
    ids = [AutoTokenizer.from_pretrained(tmp_path).pad_token_id]
    ids += [kind.from_pretrained(tmp_path).pad_token_id for kind in (AutoConfig, GenerationConfig)]
    assert ids == [tokenizer.convert_tokens_to_ids(expected)] * 3


def test_a_tokenizer_that_no_token_can_pad_or_end_is_refused():
    with pytest.raises(ValueError, match="padding token"):
        policy_of(build(MEDIA))
    with pytest.raises(ValueError, match="end-of-sequence token"):
        policy_of(build("<odd>", eos_token=None, pad_token="<odd>"))


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (3, [2, 0, 3]),
        ([3], [2, 0, 3]),
        ([0, 3, 2], [2, 0, 3]),
        (None, [2, 0]),
        ("copied", [2, 0]),  # the architecture's default, which nobody has chosen
    ],
)
def test_a_response_ends_where_template_tokenizer_or_generation_config_end_it(listed, expected, tmp_path):
    tokenizer = build("<end>", "<odd>", pad_token="<odd>")
    model = build_llama(len(tokenizer))
    if listed == "copied":
        model.config.eos_token_id = 7
        model.generation_config = GenerationConfig.from_model_config(model.config)
    else:
        model.generation_config = GenerationConfig(eos_token_id=listed, repetition_penalty=1.1)
    policy = LanguageModel(model, tokenizer, ChatTemplate.of(tokenizer))
    assert list(policy.eos_token_ids) == expected
    policy.save(tmp_path)
    assert list(LanguageModel.from_pretrained(tmp_path).eos_token_ids) == expected
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert sorted(saved.eos_token_id) == sorted(expected)
    assert saved.repetition_penalty in (None, 1.0)


NAMES = ("<reward_0>", "<reward_1>")


MODELS = {
    "llama": build_llama,
    "llama with tied embeddings": lambda size: build_llama(size, tie_word_embeddings=True),
    "llama with room": lambda size: build_llama(size + 5),  # more embeddings than tokens, as many models have
    "gpt2": build_gpt2,  # whose embeddings are tied
}


@pytest.fixture(params=MODELS)
def policy(request: pytest.FixtureRequest) -> LanguageModel:
    """With a tokenizer of its own: these tests change it."""
    tokenizer = build_tokenizer()
    return LanguageModel(MODELS[request.param](len(tokenizer)), tokenizer, TEMPLATE, max_response_tokens=16)


def tables(policy: LanguageModel) -> list[Tensor]:
    model = policy.model
    return [table.weight.detach().clone() for table in (model.get_input_embeddings(), model.get_output_embeddings())]


def test_each_is_one_new_id_with_the_mean_embedding_and_a_jitter(policy: LanguageModel) -> None:
    num_old = len(policy.tokenizer)
    before = tables(policy)
    tied = policy.model.get_input_embeddings().weight is policy.model.get_output_embeddings().weight
    ids = policy.add_control_tokens(NAMES, generator())
    assert ids == (num_old, num_old + 1)
    assert policy.tokenizer.convert_ids_to_tokens(list(ids)) == list(NAMES)
    assert control_tokens(policy.model) == ids
    assert own_control_token(policy.model) == ids[0]
    assert policy.tokenizer.eos_token == "</s>"  # nothing else is lost
    after = tables(policy)
    assert len(after[0]) >= len(policy.tokenizer)
    assert (policy.model.get_input_embeddings().weight is policy.model.get_output_embeddings().weight) == tied
    assert torch.equal(after[0], after[1]) == tied
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:num_old], old[:num_old])
        scaled = (new[list(ids)] - old[:num_old].mean(0)) / old[:num_old].std(0)
        assert abs(float(scaled.mean())) < 0.5  # of 64 normal numbers: four standard errors
        assert 0.65 < float(scaled.std()) < 1.35
        assert not torch.equal(new[ids[0]], new[ids[1]])


def test_it_stands_behind_bos_and_changes_what_is_said(policy: LanguageModel) -> None:
    bare = policy.encode_prompts(INSTRUCTIONS)
    free = policy.generate(INSTRUCTIONS, generator=generator(), temperature=0)
    ids = policy.add_control_tokens(NAMES, generator())
    assert policy.encode_prompts(INSTRUCTIONS) == [[prompt[0], ids[0], *prompt[1:]] for prompt in bare]
    first = policy.logits(policy.as_rollouts(INSTRUCTIONS, free.texts))
    policy.model.config.alpacafarm_control_token = ids[1]
    second = policy.logits(policy.as_rollouts(INSTRUCTIONS, free.texts))
    assert not torch.allclose(first, second, atol=1e-3)


def test_none_is_ever_sampled(policy: LanguageModel) -> None:
    """Not even where the output layer puts them first; and scorer and sampler agree on the rest."""
    ids = policy.add_control_tokens(NAMES, generator())
    with torch.no_grad():
        head = policy.model.get_output_embeddings().weight
        head[list(ids)] = 0
        head[ids[0], :16], head[ids[1], :16] = 50.0, -50.0  # one of the two has a large logit, whatever the state
    raw = policy.model(input_ids=torch.tensor([[0, 5, 6]])).logits[0, -1]
    assert int(raw.argmax()) in ids
    for temperature in (0.0, 1.0):
        sampled = policy.generate(INSTRUCTIONS, generator=generator(), temperature=temperature, num_samples=4)
        assert not set(ids) & set(sampled.tokens.tolist())
        torch.testing.assert_close(policy.logprobs(sampled), sampled.logprobs, atol=1e-4, rtol=0)
    policy.add_reference()
    logits = policy.logits(sampled)
    assert torch.equal(policy.logits(sampled, role="reference"), logits)
    assert bool((logits[:, list(ids)] == -torch.inf).all())
    torch.testing.assert_close(logits.softmax(-1).sum(-1), torch.ones(len(logits)))


def test_they_are_saved_with_the_policy(policy: LanguageModel, tmp_path: Path) -> None:
    ids = policy.add_control_tokens(NAMES, generator())
    policy.save(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved", max_response_tokens=16)
    assert control_tokens(loaded.model) == ids
    assert loaded.encode_prompts(["Hi", NAMES[0]]) == policy.encode_prompts(["Hi", NAMES[0]])
    assert loaded.encode_responses([NAMES[1]]) == policy.encode_responses([NAMES[1]])
    samples = [p.generate(INSTRUCTIONS, generator=generator()).texts for p in (policy, loaded)]
    assert samples[0] == samples[1]
    before = tables(loaded)
    assert loaded.add_control_tokens(NAMES, generator()) == ids  # a second time nothing changes
    assert all(torch.equal(a, b) for a, b in zip(before, tables(loaded), strict=True))


def test_what_cannot_be_is_refused(policy_folder: Path) -> None:
    policy = load_policy(policy_folder)
    with pytest.raises(ValueError, match=r"\['</s>'\]"):  # an ordinary token
        policy.add_control_tokens(("</s>", "<new>"), generator())
    assert control_tokens(policy.model) == ()
    policy.add_control_tokens(NAMES, generator())
    with pytest.raises(ValueError, match=r"\['<a>'\], .*\['<reward_0>', '<reward_1>'\]"):
        policy.add_control_tokens(("<a>",), generator())


PREFERENCES = tuple(
    Preference(
        Instruction(text, id=i, split="preference"),
        ("a" * (2 + i), "b" * (6 - i))[:: 1 if i % 2 else -1],
        1 + (i + 1) % 2,
    )
    for i, text in enumerate(TEXTS)
)
SMALL = RewardConditioningConfig(epochs=2, batch_size=3, learning_rate=1e-3, save_every=2)


def test_each_pair_is_read_twice_after_a_token_of_its_own(policy: LanguageModel) -> None:
    assert all(set(p.chosen) == {"a"} and set(p.rejected) == {"b"} for p in PREFERENCES)
    bare = policy.encode_prompts(TEXTS)
    agent = BinaryRewardConditioning(policy, PREFERENCES)
    data = agent._data
    ids = policy.tokenizer.convert_tokens_to_ids([POSITIVE, NEGATIVE])
    assert len(data) == 2 * len(PREFERENCES)
    assert data.instructions == TEXTS * 2
    prompts = [row.tolist() for row in torch.split(data.prompt_tokens, data.prompt_lengths.tolist())]
    assert prompts == [[prompt[0], token, *prompt[1:]] for token in ids for prompt in bare]
    responses = [p.chosen for p in PREFERENCES] + [p.rejected for p in PREFERENCES]
    assert data.texts == tuple(responses)
    assert data.tokens.tolist() == [token for row in policy.encode_responses(responses) for token in row]
    half = data[:5]  # evaluation is after the positive token
    expected = float(agent._sums(half, torch.arange(5))["loss"].detach()) / len(half.tokens)
    chosen = [Demonstration(p.instruction, p.chosen) for p in PREFERENCES]
    assert agent.evaluate(chosen) == pytest.approx(expected, abs=1e-5)


def test_the_token_decides_which_kind_is_said(policy: LanguageModel, tmp_path: Path) -> None:
    config = RewardConditioningConfig(epochs=40, batch_size=10, learning_rate=1e-2, schedule="linear")
    agent = BinaryRewardConditioning(policy, PREFERENCES, config=config)
    agent.learn()
    assert set("".join(agent.act(TEXTS))) == {"a"}
    agent.save(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved", max_response_tokens=16)
    again = BinaryRewardConditioning(loaded, PREFERENCES, config=config)  # trains on: nothing is added or changed
    assert again.act(TEXTS) == agent.act(TEXTS)
    assert torch.equal(again._data.prompt_tokens, agent._data.prompt_tokens)
    positive, negative = control_tokens(loaded.model)
    assert own_control_token(loaded.model) == positive
    loaded.model.config.alpacafarm_control_token = negative
    assert set("".join(again.act(TEXTS))) == {"b"}


@pytest.mark.parametrize("architecture", sorted(BUILDERS))
def test_with_lora_the_tokens_are_part_of_the_adapter(architecture: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    LanguageModel(BUILDERS[architecture](len(tokenizer)), tokenizer, TEMPLATE, max_response_tokens=16).save(tmp_path)
    layers = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}[architecture]
    lora = replace(LORA, target_modules=layers, fan_in_fan_out=architecture == "gpt2", init_lora_weights=False)

    def agent(out: str) -> BinaryRewardConditioning:
        policy = load_policy(tmp_path, lora=lora, max_response_tokens=16)
        config = replace(SMALL, learning_rate=1e-2, save_every=1)
        return BinaryRewardConditioning(policy, PREFERENCES, config=config, out=tmp_path / out)

    first = load_policy(tmp_path, lora=lora).model.state_dict()
    trained = agent("whole")
    policy = trained.policy
    start = {name: value.clone() for name, value in policy.model.state_dict().items()}
    names = [name for name in start if "lora_" in name]
    assert all(torch.equal(start[name], first[name]) for name in names)  # what the adapter was before
    trained.learn()
    changed = {name for name, value in policy.model.state_dict().items() if not torch.equal(value, start[name])}
    assert changed >= set(names)
    assert {name for name in changed if "lora_" not in name} == {n for n in start if "trainable_tokens_delta" in n}
    parts = agent("parts").updates()
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    agent("parts").learn()
    places = [tmp_path / out / "checkpoint-8/policy" for out in ("whole", "parts")]
    whole, resumed = ((place / "adapter_model.safetensors").read_bytes() for place in places)
    assert whole == resumed
    assert len(whole) < (tmp_path / "model.safetensors").stat().st_size / 2
    loaded = load_policy(places[0], max_response_tokens=16)
    assert control_tokens(loaded._base_model) == control_tokens(policy._base_model) != ()
    rollouts = policy.as_rollouts(TEXTS, TEXTS)
    torch.testing.assert_close(loaded.logprobs(rollouts), policy.logprobs(rollouts), rtol=0, atol=0)
    assert loaded.encode_prompts(TEXTS) == policy.encode_prompts(TEXTS)
    assert torch.equal(*(each.generate(TEXTS, generator=generator()).tokens for each in (loaded, policy)))
