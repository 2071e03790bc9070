"""Control tokens: new ids in front of a prompt that no text encodes to and no model says."""

from pathlib import Path

import pytest
import torch
from tiny_models import INSTRUCTIONS, TEMPLATE, build_gpt2, build_llama, build_tokenizer, generator
from tiny_worlds import load_policy
from torch import Tensor

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.special_tokens import (
    conditioned,
    control_tokens,
    own_control_token,
    unconditioned,
)

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
    return LanguageModel(MODELS[request.param](len(tokenizer)), tokenizer, TEMPLATE, max_response_tokens=8)


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


def test_no_text_encodes_to_one(policy: LanguageModel) -> None:
    ids = set(policy.add_control_tokens(NAMES, generator()))
    texts = [f"Say {NAMES[0]} twice", *NAMES, f" {NAMES[1]}{NAMES[0]}"]
    prompts = policy.encode_prompts(texts)
    assert [[i for i, token in enumerate(prompt) if token in ids] for prompt in prompts] == [[1]] * 4  # its own only
    responses = policy.encode_responses(texts)
    assert not ids & {token for row in responses for token in row}
    decoded = policy.tokenizer.batch_decode([row[:-1] for row in responses], clean_up_tokenization_spaces=False)
    assert decoded == texts


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
    loaded = load_policy(tmp_path / "saved", max_response_tokens=8)
    assert control_tokens(loaded.model) == ids
    assert loaded.encode_prompts(["Hi", NAMES[0]]) == policy.encode_prompts(["Hi", NAMES[0]])
    assert loaded.encode_responses([NAMES[1]]) == policy.encode_responses([NAMES[1]])
    samples = [p.generate(INSTRUCTIONS, generator=generator()).texts for p in (policy, loaded)]
    assert samples[0] == samples[1]
    before = tables(loaded)
    assert loaded.add_control_tokens(NAMES, generator()) == ids  # a second time nothing changes
    assert all(torch.equal(a, b) for a, b in zip(before, tables(loaded), strict=True))


def test_conditioned_and_back(llama: LanguageModel) -> None:
    data = llama.as_rollouts(INSTRUCTIONS, ["a", "bc", "", "d", "e"])
    tokens = [300, 301, 300, 301, 301]
    changed = conditioned(data, tokens, bos=0)
    assert changed.prompt_lengths.tolist() == [length + 1 for length in data.prompt_lengths.tolist()]
    prompts = torch.split(changed.prompt_tokens, changed.prompt_lengths.tolist())
    for prompt, token, bare in zip(prompts, tokens, llama.encode_prompts(INSTRUCTIONS), strict=True):
        assert prompt.tolist() == [0, token, *bare[1:]]
    for column in ("tokens", "lengths", "logprobs", "finished"):
        assert torch.equal(getattr(changed, column), getattr(data, column))
    assert (changed.instructions, changed.texts) == (data.instructions, data.texts)
    back = unconditioned(changed, (300, 301))
    assert torch.equal(back.prompt_tokens, data.prompt_tokens)
    assert torch.equal(back.prompt_lengths, data.prompt_lengths)
    assert unconditioned(changed, ()) is changed
    with pytest.raises(ValueError, match="5 rows, got 1"):
        conditioned(data, [300], bos=0)


def test_what_cannot_be_is_refused(policy_folder: Path) -> None:
    policy = load_policy(policy_folder)
    with pytest.raises(ValueError, match=r"\['</s>'\]"):  # an ordinary token
        policy.add_control_tokens(("</s>", "<new>"), generator())
    assert control_tokens(policy.model) == ()
    policy.add_control_tokens(NAMES, generator())
    with pytest.raises(ValueError, match=r"\['<a>'\], .*\['<reward_0>', '<reward_1>'\]"):
        policy.add_control_tokens(("<a>",), generator())
