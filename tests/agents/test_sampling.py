"""The decode loop: exact log-probabilities, exact distribution, and nothing that depends on the batch."""

import math

import pytest
import torch
from scipy.stats import chisquare
from tiny_models import BUILDERS, build_llama, generator
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from alpacafarm_env.agents.sampling import pick, sample

VOCABULARY, EOS = 40, 1


def prompts_of(lengths: tuple[int, ...], *, seed: int = 0) -> list[list[int]]:
    drawn = generator(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=drawn).tolist() for length in lengths]


PROMPTS = prompts_of((5, 2, 9, 1, 9, 5, 3, 7))


def draw(model, prompts=PROMPTS, *, steps=24, temperature=1.0, seed=0, **options):
    uniforms = None if temperature == 0 else torch.rand(len(prompts), steps, generator=generator(seed))
    return sample(
        model,
        prompts,
        uniforms=uniforms,
        max_new_tokens=steps,
        temperature=temperature,
        eos_token_ids=[EOS],
        **options,
    )


@torch.no_grad()
def full_forward(model, prompt, response, temperature=1.0):
    """Log-probabilities of a response by one unpadded pass without a cache: what the loop must agree with."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0].float() / temperature
    positions = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    return logits.log_softmax(-1)[positions, torch.tensor(response)]


@pytest.fixture(params=sorted(BUILDERS))
def model(request):
    return BUILDERS[request.param](VOCABULARY).eval()


@pytest.fixture
def likely_eos():
    """A model that ends at random after about eight tokens, so that rows leave the batch all the time."""
    model = build_llama(VOCABULARY)
    bonus = 2.0 * nn.functional.one_hot(torch.tensor(EOS), VOCABULARY)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits + bonus)
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("options", [{}, {"batch_size": 3}])
def test_cached_decode_equals_full_forward(model, temperature, options):
    samples = draw(model, temperature=temperature, **options)
    for row, prompt in enumerate(PROMPTS):
        length = int(samples.lengths[row])
        expected = full_forward(model, prompt, samples.tokens[row, :length].tolist(), temperature)
        torch.testing.assert_close(samples.logprobs[row, :length], expected, atol=1e-5, rtol=0)


def test_eager_attention_agrees(model):
    expected = draw(model)
    model.set_attn_implementation("eager")
    samples = draw(model)
    assert torch.equal(samples.tokens, expected.tokens)
    torch.testing.assert_close(samples.logprobs, expected.logprobs, atol=1e-5, rtol=0)


def test_greedy_equals_transformers_generate(model):
    samples = draw(model, temperature=0)
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=EOS,
            pad_token_id=2,
        )
        length = int(samples.lengths[row])
        assert samples.tokens[row, :length].tolist() == output[0, len(prompt) :].tolist()
        expected = full_forward(model, prompt, samples.tokens[row, :length].tolist())
        torch.testing.assert_close(samples.logprobs[row, :length], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "other", [{"compact_below": 0.0}, {"compact_below": 0.5}, {"batch_size": 7}, {"batch_size": 1}]
)
def test_compaction_and_batches_change_nothing(likely_eos, other):
    prompts = prompts_of(tuple(range(1, 13)) * 4)
    expected = draw(likely_eos, prompts, compact_below=1.0)
    lengths = expected.lengths
    assert len(set(lengths.tolist())) > 8  # rows do end at different times
    samples = draw(likely_eos, prompts, **other)
    assert torch.equal(samples.lengths, lengths)
    assert torch.equal(samples.finished, expected.finished)
    real = torch.arange(24) < lengths[:, None]
    assert torch.equal(samples.tokens[real], expected.tokens[real])
    torch.testing.assert_close(samples.logprobs[real], expected.logprobs[real], atol=1e-5, rtol=0)


def test_compaction_leaves_no_ended_row_in_the_batch(likely_eos):
    sizes = []
    likely_eos.register_forward_pre_hook(
        lambda module, args, options: sizes.append(len(options["input_ids"])), with_kwargs=True
    )
    samples = draw(likely_eos, prompts_of((4,) * 64), compact_below=1.0)
    # The k-th pass after the prompts' reads token k of every row that goes on after it.
    assert sizes[1:] == [int((samples.lengths > k).sum()) for k in range(1, len(sizes))]
    assert min(sizes[1:]) < 16


def test_equal_prompts_are_read_once_and_continue_apart(model):
    widths = []
    model.register_forward_pre_hook(
        lambda module, args, options: widths.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    prompts = [PROMPTS[0]] * 3 + [PROMPTS[1]] * 2 + [PROMPTS[2]]
    samples = draw(model, prompts)
    assert widths[0] == (3, 9)
    assert widths[1][0] == 6
    assert len({tuple(row) for row in samples.tokens.tolist()}) == 6
    for row, prompt in enumerate(prompts):
        length = int(samples.lengths[row])
        expected = full_forward(model, prompt, samples.tokens[row, :length].tolist())
        torch.testing.assert_close(samples.logprobs[row, :length], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 7, 100])
def test_a_prompt_is_read_once_though_its_rows_fill_several_batches(model, batch_size):
    """Batches that go on with a prompt alone, with others of its length, and beside longer ones."""
    read = []

    def count(module, args, options):
        ids = options["input_ids"]
        if options["past_key_values"].get_seq_length() == 0:
            pads = (options["position_ids"] == 0).sum(dim=1) - 1
            read.extend(tuple(row[pad:].tolist()) for row, pad in zip(ids, pads, strict=True))

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    distinct = prompts_of((1, 4, 4, 6, 9))
    prompts = [prompt for prompt, number in zip(distinct, (2, 5, 1, 8, 3), strict=True) for _ in range(number)]
    samples = draw(model, prompts, steps=8, batch_size=batch_size)
    hook.remove()
    assert sorted(read) == sorted(map(tuple, distinct))
    assert len({tuple(row) for row in samples.tokens.tolist()}) > 2 * len(distinct)  # equal prompts go on apart
    for row, prompt in enumerate(prompts):
        length = int(samples.lengths[row])
        expected = full_forward(model, prompt, samples.tokens[row, :length].tolist())
        torch.testing.assert_close(samples.logprobs[row, :length], expected, atol=1e-5, rtol=0)


def test_1024_samples_of_a_prompt_in_batches_of_256_read_its_tokens_once(model):
    sizes = []
    model.register_forward_pre_hook(
        lambda module, args, options: sizes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    together = draw(model, [PROMPTS[2]] * 1024, steps=6, batch_size=1024, compact_below=1.0)
    assert sizes[0] == (1, 9)
    sizes.clear()
    apart = draw(model, [PROMPTS[2]] * 1024, steps=6, batch_size=256, compact_below=1.0)
    assert [size for size in sizes if size[1] > 1] == [(1, 9)]
    assert sum(rows * width for rows, width in sizes) == 9 + int((apart.lengths - 1).sum())
    assert torch.equal(apart.lengths, together.lengths)
    real = torch.arange(6) < apart.lengths[:, None]
    assert torch.equal(apart.tokens[real], together.tokens[real])


def test_eos_is_kept_and_ends_a_row(likely_eos):
    samples = draw(likely_eos, prompts_of((4,) * 64))
    assert 0 < samples.finished.sum() < 64
    for row in range(64):
        tokens = samples.tokens[row, : int(samples.lengths[row])].tolist()
        assert (EOS in tokens) == bool(samples.finished[row])
        assert EOS not in tokens[:-1]
        assert bool(samples.finished[row]) or len(tokens) == 24


def test_no_gradient_is_recorded(model):
    with torch.enable_grad():
        samples = draw(model)
    assert not samples.logprobs.requires_grad
    assert not samples.logprobs.is_inference()  # inference tensors could not enter a loss later


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_distribution_is_the_softmax(temperature):
    logits = torch.tensor([1.5, -0.3, 0.0, 2.2, -4.0, 0.7])
    number = 40_000
    token, logprob = pick(logits.expand(number, -1), torch.rand(number, generator=generator()), temperature)
    expected = (logits / temperature).softmax(-1)
    counts = torch.bincount(token, minlength=6)
    assert chisquare(counts.numpy(), (expected.double() / expected.double().sum() * number).numpy()).pvalue > 1e-3
    torch.testing.assert_close(logprob, expected.log()[token], atol=1e-6, rtol=0)


def test_two_steps_of_a_model_follow_its_distribution():
    model = build_llama(6)
    number = 6_000
    uniforms = torch.rand(number, 2, generator=generator())
    samples = sample(
        model,
        [[3, 4]] * number,
        uniforms=uniforms,
        max_new_tokens=2,
        temperature=1.0,
        eos_token_ids=[-1],
        batch_size=6_000,
    )
    with torch.no_grad():
        first = model(torch.tensor([[3, 4]])).logits[0, -1].double().softmax(-1)
        pairs = torch.tensor([[3, 4, token] for token in range(6)])
        joint = first[:, None] * model(pairs).logits[:, -1].double().softmax(-1)
    counts = torch.bincount(samples.tokens[:, 0] * 6 + samples.tokens[:, 1], minlength=36)
    keep = joint.flatten() * number > 5  # the test's own condition; what is rarer goes into one bin
    observed = [*counts[keep].tolist(), int(counts[~keep].sum())]
    expected = [*(joint.flatten()[keep] * number).tolist(), float(joint.flatten()[~keep].sum() * number)]
    scale = sum(observed) / math.fsum(expected)
    assert chisquare(observed, [value * scale for value in expected]).pvalue > 1e-3


def test_extreme_uniforms_draw_possible_tokens_only():
    impossible = -math.inf
    logits = torch.tensor([[impossible, 0.3, impossible, 0.1, impossible]]).repeat(2, 1)
    token, _ = pick(logits, torch.tensor([0.0, 1 - 2**-24]), 1.0)
    assert token.tolist() == [1, 3]


def test_arguments_that_do_not_fit_are_refused(model):
    with pytest.raises(ValueError, match="none for greedy"):
        sample(model, PROMPTS, uniforms=None, max_new_tokens=2, temperature=1.0, eos_token_ids=[EOS])
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'sdpa' or 'eager', got 'flex_attention'"):
        draw(model)


def test_sliding_window_shorter_than_the_text_is_refused():
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=16,
    )
    model = MistralForCausalLM(config).eval()
    assert isinstance(model.lm_head, nn.Linear)
    samples = draw(model, steps=7)  # 9 + 7 tokens fill the window exactly
    expected = full_forward(model, PROMPTS[2], samples.tokens[2, : int(samples.lengths[2])].tolist())
    torch.testing.assert_close(samples.logprobs[2, : int(samples.lengths[2])], expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="17 tokens, more than the model's sliding window of 16"):
        draw(model, steps=8)
