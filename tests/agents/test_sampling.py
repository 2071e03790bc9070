"""The decode loop: exact log-probabilities, exact distribution, and nothing that depends on the batch."""

import pytest
import torch
from scipy.stats import chisquare
from tiny_models import BUILDERS, build_llama, generator, say_more
from transformers import MistralConfig, MistralForCausalLM

from alpacafarm_env.agents.sampling import pick, sample

VOCABULARY, EOS = 40, 1


def prompts_of(lengths: tuple[int, ...], *, seed: int = 0) -> list[list[int]]:
    drawn = generator(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=drawn).tolist() for length in lengths]


PROMPTS = prompts_of((5, 2, 9, 1, 9, 5, 3, 7))


def draw(model, prompts=PROMPTS, *, steps=24, temperature=1.0, seed=0, **options):
    uniforms = None if temperature == 0 else torch.rand(len(prompts), steps, generator=generator(seed))
    options = {"max_new_tokens": steps, "temperature": temperature, "eos_token_ids": [EOS], **options}
    return sample(model, prompts, uniforms=uniforms, **options)


@torch.no_grad()
def check(model, prompts, samples, temperature=1.0):
    """Log-probabilities of the responses by one unpadded pass each without a cache: what the loop must agree with."""
    for prompt, tokens, logprobs, length in zip(prompts, *samples[:3], strict=True):
        response = tokens[:length]
        logits = model(input_ids=torch.cat([torch.tensor(prompt), response])[None]).logits[0, len(prompt) - 1 : -1]
        expected = (logits.float() / temperature).log_softmax(-1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(logprobs[:length], expected, atol=1e-5, rtol=0)


def watch(model):
    """Shapes of what the model reads from now on."""
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, options: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.fixture(params=sorted(BUILDERS))
def model(request):
    return BUILDERS[request.param](VOCABULARY).eval()


@pytest.fixture
def likely_eos():
    """A model that ends at random after about eight tokens, so that rows leave the batch all the time."""
    model = build_llama(VOCABULARY)
    say_more(model, EOS, 2.0)
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("options", [{}, {"batch_size": 3}])
def test_cached_decode_equals_full_forward(model, temperature, options):
    samples = draw(model, temperature=temperature, **options)
    check(model, PROMPTS, samples, temperature)
    model.set_attn_implementation("eager")
    assert torch.equal(draw(model, temperature=temperature, **options).tokens, samples.tokens)
    assert not samples.logprobs.requires_grad
    assert not samples.logprobs.is_inference()  # inference tensors could not enter a loss later


def test_greedy_equals_transformers_generate(model):
    samples = draw(model, temperature=0)
    check(model, PROMPTS, samples)
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": EOS, "pad_token_id": 2}
    for prompt, tokens, length in zip(PROMPTS, samples.tokens, samples.lengths, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert tokens[:length].tolist() == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "other", [{"compact_below": 0.0}, {"compact_below": 0.5}, {"batch_size": 7}, {"batch_size": 1}]
)
def test_compaction_and_batches_change_nothing_and_eos_ends_a_row(likely_eos, other):
    prompts = prompts_of(tuple(range(1, 13)) * 2)
    expected, samples = draw(likely_eos, prompts, compact_below=1.0), draw(likely_eos, prompts, **other)
    assert len(set(expected.lengths.tolist())) > 8  # rows do end at different times
    assert torch.equal(samples.lengths, expected.lengths)
    assert torch.equal(samples.finished, expected.finished)
    real = torch.arange(24) < expected.lengths[:, None]
    assert torch.equal(samples.tokens[real], expected.tokens[real])
    torch.testing.assert_close(samples.logprobs[real], expected.logprobs[real], atol=1e-5, rtol=0)
    for tokens, length, finished in zip(samples.tokens, samples.lengths, samples.finished, strict=True):
        assert (tokens[:length] == EOS).nonzero().flatten().tolist() == [int(length) - 1] * bool(finished)
        assert finished or length == 24


def test_compaction_leaves_no_ended_row_in_the_batch(likely_eos):
    shapes = watch(likely_eos)
    samples = draw(likely_eos, prompts_of((4,) * 64), compact_below=1.0)
    sizes = [rows for rows, _ in shapes]
    # The k-th pass after the prompts' reads token k of every row that goes on after it.
    assert sizes[1:] == [int((samples.lengths > k).sum()) for k in range(1, len(sizes))]
    assert min(sizes[1:]) < 16


def test_equal_prompts_of_a_batch_are_read_once(model):
    shapes = watch(model)
    distinct = prompts_of((1, 4, 4, 6, 9))
    prompts = [prompt for prompt, number in zip(distinct, (2, 5, 1, 8, 3), strict=True) for _ in range(number)]
    samples = draw(model, prompts, steps=8, batch_size=100)
    assert shapes[0][0] == len(distinct)
    assert len({tuple(row) for row in samples.tokens.tolist()}) > 2 * len(distinct)  # equal prompts go on apart
    check(model, prompts, samples)


def follows(counts, probabilities):
    """Whether a chi-square test finds nothing amiss; outcomes expected up to five times go into one bin, as it asks."""
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    places = torch.where(expected > 5, torch.arange(len(expected)), len(expected))
    observed, wanted = (torch.bincount(places, weights=column) for column in (counts.double(), expected))
    return chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_distribution_is_the_softmax(temperature):
    logits = torch.tensor([1.5, -0.3, 0.0, 2.2, -4.0, 0.7])
    token, logprob = pick(logits.expand(40_000, -1), torch.rand(40_000, generator=generator()), temperature)
    expected = (logits / temperature).softmax(-1)
    assert follows(torch.bincount(token, minlength=6), expected)
    torch.testing.assert_close(logprob, expected.log()[token], atol=1e-6, rtol=0)


def test_extreme_uniforms_draw_possible_tokens_only():
    logits = torch.tensor([[-torch.inf, 0.3, -torch.inf, 0.1, -torch.inf]]).repeat(2, 1)
    token, _ = pick(logits, torch.tensor([0.0, 1 - 2**-24]), 1.0)
    assert token.tolist() == [1, 3]


def test_arguments_that_do_not_fit_are_refused(model):
    with pytest.raises(ValueError, match="none for greedy"):
        sample(model, PROMPTS, uniforms=None, max_new_tokens=2, temperature=1.0, eos_token_ids=[EOS])
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'sdpa' or 'eager', got 'flex_attention'"):
        draw(model)


def test_sliding_window_shorter_than_the_text_is_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MistralConfig(vocab_size=VOCABULARY, num_key_value_heads=1, sliding_window=16, **sizes)
    model = MistralForCausalLM(config).eval()
    check(model, PROMPTS, draw(model, steps=7))  # 9 + 7 tokens fill the window exactly
    with pytest.raises(ValueError, match="17 tokens.* 16"):
        draw(model, steps=8)
