"""`LanguageModel`: text to tokens, sampling against scoring, roles, and folders."""

import copy
from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file
from tiny_worlds import (
    BUILDERS,
    ENDS,
    INSTRUCTIONS,
    TEMPLATE,
    build_ending,
    build_gpt2,
    build_llama,
    generator,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.rollouts import micro_batches, ragged_split, scoring_batch
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.templates import PromptTemplate

RESPONSES = ("An owl and a robin.", "", "Blue — and wide.", "4", "Oak")
LORA = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")
# peft 0.18 looks for the folder of a model that was built in memory.
BUILT_IN_MEMORY = pytest.mark.filterwarnings("ignore:Could not find a config file in  -:UserWarning")


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_prompt_is_bos_and_the_rendered_template(llama):
    (tokens,) = llama.encode_prompts([Instruction("Translate.", "Bonjour")])
    assert tokens[0] == llama.tokenizer.bos_token_id
    assert llama.tokenizer.decode(tokens[1:]) == "Q: Translate.\nIn: Bonjour\nA:"
    llama.max_prompt_tokens = 12
    with pytest.raises(ValueError, match=r"12 tokens, got 22 .*'List two birds.'"):
        llama.encode_prompts(["Hi", "List two birds."])


def test_responses_end_with_eos_and_read_back_unless_they_are_cut(llama):
    llama.max_response_tokens = 64
    rollouts = llama.as_rollouts(INSTRUCTIONS, RESPONSES)
    rows = ragged_split(rollouts.tokens, rollouts.lengths)
    assert all(row[-1] == llama.tokenizer.eos_token_id for row in rows)
    assert tuple(llama.tokenizer.decode(row[:-1]) for row in rows) == RESPONSES == rollouts.texts
    assert rollouts.finished.all()
    assert not rollouts.logprobs.any()
    llama.max_response_tokens = 4
    rollouts = llama.as_rollouts(["a", "b"], ["12345", "123"])
    assert rollouts.lengths.tolist() == [4, 4]
    assert rollouts.finished.tolist() == [False, True]
    assert llama.tokenizer.decode(rollouts.tokens[:4]) == "1234"
    with pytest.raises(ValueError, match="2 instructions but 1 responses"):
        llama.as_rollouts(["a", "b"], ["c"])


def test_response_continues_the_prompt_for_a_tokenizer_that_prefixes_spaces():
    # SentencePiece's way: every text starts with a space. The response does not start a text.
    pieces = ["<unk>", "</s>", "<pad>", "▁", ":", *["▁Hello", "▁Hi", "Hello", "Hi", "A", "Q", "▁Q", "▁A"]]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    spaces = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([spaces, pre_tokenizers.Punctuation()])
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    template = PromptTemplate("{instruction}{input}:", "{instruction}:")
    lm = LanguageModel(build_llama(len(tokenizer)), tokenizer, template)
    joint = tokenizer("Q:Hello Hi")["input_ids"]
    assert lm.encode_prompts(["Q"])[0] + lm.encode_responses(["Hello Hi"], eos=False)[0] == joint


@pytest.mark.parametrize("architecture", sorted(BUILDERS))
def test_more_tokens_than_embeddings(tokenizer, architecture):
    with pytest.raises(ValueError, match=r"259 .* 100"):
        LanguageModel(BUILDERS[architecture](100), tokenizer, TEMPLATE)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0])
def test_sampled_logprobs_are_the_scored_ones_and_rollouts_are_complete(language_model, temperature):
    rollouts = language_model.generate(INSTRUCTIONS, generator=generator(), temperature=temperature, num_samples=2)
    assert_close(language_model.logprobs(rollouts, temperature=temperature).detach(), rollouts.logprobs)
    # The temperature is not without effect: under another one the numbers differ.
    assert (language_model.logprobs(rollouts, temperature=1.3) - rollouts.logprobs).abs().max() > 0.1
    assert rollouts.instructions == tuple(text for text in INSTRUCTIONS for _ in range(2))
    prompts = ragged_split(rollouts.prompt_tokens, rollouts.prompt_lengths)
    assert [row.tolist() for row in prompts[::2]] == language_model.encode_prompts(INSTRUCTIONS)
    eos, tokenizer = language_model.tokenizer.eos_token_id, language_model.tokenizer
    for row, tokens in enumerate(ragged_split(rollouts.tokens, rollouts.lengths)):
        assert bool(rollouts.finished[row]) == (int(tokens[-1]) == eos)
        assert rollouts.texts[row] == tokenizer.decode(tokens[tokens != eos], skip_special_tokens=True)
    other = language_model.generate(INSTRUCTIONS, generator=generator(1), temperature=temperature, num_samples=2)
    assert torch.equal(other.tokens, rollouts.tokens) == (temperature == 0)


def test_what_cannot_be_sampled_or_scored(llama, tokenizer):
    assert len(llama.generate([], generator=generator())) == 0
    bad = {"temperature": (-1, float("nan")), "max_new_tokens": (0,), "batch_size": (0,), "num_samples": (0,)}
    for name, value in ((name, value) for name, values in bad.items() for value in values):
        with pytest.raises(ValueError, match=f"{name}.*{value!r}"):
            llama.generate(INSTRUCTIONS, generator=generator(), **{name: value})
    with pytest.raises(ValueError, match="'refernce'.*reference"):
        llama.logprobs(llama.as_rollouts(["a"], ["b"]), role="refernce")
    small = LanguageModel(build_llama(len(tokenizer), max_positions=32), tokenizer, TEMPLATE)
    with pytest.raises(ValueError, match="32 positions"):
        small.generate(["Hi"], generator=generator(), max_new_tokens=30)
    small.max_response_tokens = 31
    with pytest.raises(ValueError, match="32 positions"):
        small.logprobs(small.as_rollouts(["Hi"], ["x" * 30]))


def test_scores_and_gradients_are_those_of_one_row_at_a_time(language_model):
    language_model.max_response_tokens = 64
    rollouts = language_model.as_rollouts(INSTRUCTIONS, RESPONSES)
    gradients = []
    for budget in (10_000, 70):
        language_model.model.zero_grad()
        for rows in micro_batches(rollouts.total_lengths, budget):
            language_model.logprobs(rollouts[rows]).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in language_model.model.parameters()])
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)
    together = language_model.logprobs(rollouts)
    for row, alone in enumerate(ragged_split(together, rollouts.lengths)):
        ids = torch.cat([rollouts[[row]].prompt_tokens, rollouts[[row]].tokens])
        logits = language_model.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        start = int(rollouts.prompt_lengths[row])
        assert_close(alone, logits[torch.arange(start - 1, len(ids) - 1), ids[start:]])


def test_dropout_is_off_even_in_train_mode(tokenizer):
    lm = LanguageModel(build_gpt2(len(tokenizer)), tokenizer, TEMPLATE)
    rollouts = lm.as_rollouts(INSTRUCTIONS, RESPONSES)
    expected = lm.logprobs(rollouts)
    assert not lm.model.training
    lm.model.train()
    assert_close(lm.logprobs(rollouts), expected)


def test_bfloat16_weights_score_in_float32(tokenizer):
    lm = LanguageModel(build_llama(len(tokenizer)).to(torch.bfloat16), tokenizer, TEMPLATE, max_response_tokens=8)
    rollouts = lm.generate(INSTRUCTIONS, generator=generator())
    assert rollouts.logprobs.dtype == lm.logprobs(rollouts).dtype == torch.float32


def test_the_reference_of_trained_adapters_is_where_they_were(policy_folder, llama, tmp_path):
    lora = replace(LORA, init_lora_weights=False)
    lm = LanguageModel.from_pretrained(policy_folder, lora=lora, max_response_tokens=16)
    with pytest.raises(RuntimeError, match="add_reference"):
        lm.logprobs(lm.as_rollouts(INSTRUCTIONS, RESPONSES), role="reference")
    trainable = [name for name, parameter in lm.model.named_parameters() if parameter.requires_grad]
    rollouts = lm.as_rollouts(INSTRUCTIONS, RESPONSES)
    start = lm.logprobs(rollouts).detach()
    lm.add_reference()
    with torch.no_grad():
        for parameter in lm.model.parameters():
            if parameter.requires_grad:
                parameter.mul_(2)
    assert torch.equal(lm.logprobs(rollouts, role="reference"), start)
    assert not lm.logprobs(rollouts, role="reference").requires_grad
    assert (start - llama.logprobs(rollouts)).abs().max() > 0.1
    moved = lm.logprobs(rollouts)
    assert (moved - start).abs().max() > 0.1  # scoring the reference left the policy as it was
    assert trainable == [name for name, parameter in lm.model.named_parameters() if parameter.requires_grad]
    lm.model.save_pretrained(tmp_path)
    assert not any("reference" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_the_longest_response_is_saved_and_an_argument_wins(policy_folder, tmp_path):
    LanguageModel.from_pretrained(policy_folder, max_response_tokens=110).save(tmp_path / "longer")
    for given, limits in (
        ({}, (146, 110)),  # of 256 positions
        ({"max_response_tokens": 20}, (192, 20)),
        ({"max_prompt_tokens": 200}, (200, 56)),
    ):
        loaded = LanguageModel.from_pretrained(tmp_path / "longer", **given)
        assert (loaded.max_prompt_tokens, loaded.max_response_tokens) == limits
    LanguageModel.from_pretrained(tmp_path / "longer", max_response_tokens=64).save(tmp_path / "default")
    assert LanguageModel.from_pretrained(tmp_path / "default").max_response_tokens == 64


@BUILT_IN_MEMORY
def test_a_fresh_adapter_is_drawn_from_its_seed_and_leaves_torchs_stream_alone(policy_folder):
    before = torch.get_rng_state()
    first, same, other = (
        LanguageModel.from_pretrained(policy_folder, lora=LORA, seed=seed, max_response_tokens=16).model.state_dict()
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    name = next(name for name in first if "lora_A" in name)
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])


def test_pickled_weights_are_refused(tmp_path, llama):
    llama.save(tmp_path / "whole")
    LanguageModel.from_pretrained(tmp_path / "whole", lora=copy.deepcopy(LORA)).save(tmp_path / "adapter")
    for weights, pickled in (
        ("whole/model", "whole/pytorch_model"),
        ("adapter/adapter_model", "adapter/adapter_model"),
    ):
        found = tmp_path / f"{weights}.safetensors"
        torch.save(load_file(found), tmp_path / f"{pickled}.bin")
        kept = found.rename(tmp_path / "kept")
        with pytest.raises(CheckpointError, match="safetensors"):
            LanguageModel.from_pretrained(found.parent)
        kept.rename(found)


@pytest.mark.parametrize("architecture", ENDS)
def test_scores_are_those_of_the_whole_forward_pass(architecture, tokenizer):
    lm = build_ending(architecture, tokenizer)
    rollouts = lm.generate(INSTRUCTIONS, generator=generator(), num_samples=2)
    ids, predicts = scoring_batch(rollouts, fill_token_id=1)
    expected = lm.model(input_ids=ids).logits[predicts].log_softmax(-1).gather(1, rollouts.tokens[:, None])[:, 0]
    seen = []
    watch = lm.model.get_output_embeddings().register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    found = lm.logprobs(rollouts)
    watch.remove()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.detach(), rollouts.logprobs, atol=1e-5, rtol=0)
    assert seen == [(len(rollouts.tokens), 32)]  # and not the whole [B, L]


def test_a_deep_copy_is_refused_when_it_is_used(llama: LanguageModel) -> None:
    copied = copy.deepcopy(llama)
    assert copy.deepcopy(copied) is copied
    with pytest.raises(TypeError, match="LanguageModel .* save it"):
        copied.generate(["Hi"])
