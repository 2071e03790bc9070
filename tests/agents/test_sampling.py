"""Sampling draws from the model's distribution, whatever the batch; rollouts are ragged."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_worlds import BUILDERS, build_llama, generator, say_more
from transformers import MistralConfig, MistralForCausalLM

from alpacafarm_env.agents.rollouts import (
    Rollouts,
    micro_batches,
    pad_rows,
    ragged,
    ragged_split,
    scoring_batch,
    segment_sum,
    unpad,
)
from alpacafarm_env.agents.sampling import BLOCK, pick, sample

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


LARGE = 16 * BLOCK


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [6, LARGE])
def test_draws_invert_the_cumulative_probabilities(size, temperature):
    logits = 3 * torch.randn(2_000, size, generator=generator())
    logits[:, size // 16 : 3 * size // 16] = -torch.inf
    uniform = torch.rand(2_000, generator=generator(1))
    token, logprob = pick(logits, uniform, temperature)
    exact = (logits.double() / temperature).log_softmax(-1)
    cdf = exact.exp().cumsum(-1)
    at = token[:, None]
    upper, lower = cdf.gather(1, at)[:, 0], (cdf.gather(1, at) - exact.exp().gather(1, at))[:, 0]
    assert ((lower - 1e-6 < uniform) & (uniform < upper + 1e-6)).all()
    torch.testing.assert_close(logprob, exact.gather(1, at)[:, 0].float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("size", "possible"), [(5, [1, 3]), (LARGE, [BLOCK + 3, LARGE - BLOCK - 2])])
def test_extreme_uniforms_draw_possible_tokens_only(size, possible):
    logits = torch.full((2, size), -torch.inf)
    logits[:, possible] = torch.tensor([0.3, 0.1])
    token, _ = pick(logits, torch.tensor([0.0, 1 - 2**-24]), 1.0)
    assert token.tolist() == possible


@pytest.mark.parametrize("lengths", [(4, 4, 1), (1, 7, 3, 7)])
def test_what_all_prompts_begin_with_is_read_once(model, lengths):
    beginning = prompts_of((12,))[0]
    prompts = [beginning + prompt for prompt in prompts_of(lengths, seed=1)]
    shapes = watch(model)
    samples = draw(model, [prompt for prompt in prompts for _ in range(2)], steps=8)
    assert shapes[:2] == [(1, 12), (len(prompts), max(lengths))]
    check(model, [prompt for prompt in prompts for _ in range(2)], samples)


def test_a_prompt_that_begins_another_is_continued_alone(model):
    long = prompts_of((20,))[0]
    prompts = [long, long[:12], long[:12]]
    check(model, prompts, draw(model, prompts, steps=8))


def test_many_prompts_are_read_in_several_passes(model, monkeypatch):
    monkeypatch.setattr("alpacafarm_env.agents.sampling.tokens_at_once", lambda device: 12)
    shapes = watch(model)
    samples = draw(model)
    reads = [shape for shape in shapes if shape[1] > 1 or shape[0] == 1]
    assert all(rows * width <= 12 for rows, width in reads)
    check(model, PROMPTS, samples)


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


ids = st.lists(st.integers(10, 99), max_size=4)
batches = st.lists(st.tuples(ids.filter(len), ids, st.booleans()), min_size=1, max_size=6)
"""Prompt, response (which may be empty) and whether it finished."""
fast = settings(max_examples=50)


def make(rows: list[Any]) -> Rollouts:
    (prompt_tokens, prompt_lengths), (tokens, lengths) = (ragged([row[i] for row in rows]) for i in (0, 1))
    texts = tuple(map(str, range(len(rows))))
    finished = torch.tensor([row[2] for row in rows])
    logprobs = -torch.arange(1.0, len(tokens) + 1)
    return Rollouts(texts, texts, prompt_tokens, prompt_lengths, tokens, lengths, logprobs, finished)


def rows_of(batch: Rollouts) -> list[tuple[Any, ...]]:
    """Each row as plain Python, so that selections compare as lists."""
    flat = ((batch.prompt_tokens, batch.prompt_lengths), (batch.tokens, batch.lengths), (batch.logprobs, batch.lengths))
    columns = [[row.tolist() for row in ragged_split(*part)] for part in flat]
    return list(zip(batch.instructions, batch.texts, *columns, batch.finished.tolist(), strict=True))


@fast
@given(batches, st.data())
def test_selections_take_whole_rows_and_cat_joins_them(rows: list[Any], data: st.DataObject) -> None:
    batch, size = make(rows), len(rows)
    plain = rows_of(batch)
    assert [(prompt, tokens, done) for _, _, prompt, tokens, _, done in plain] == rows
    chosen = data.draw(st.lists(st.integers(-size, size - 1)))  # repeated, from the end, in any order, or none
    assert rows_of(batch[chosen]) == [plain[i] for i in chosen]
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    assert rows_of(batch[torch.tensor(mask)]) == [row for row, kept in zip(plain, mask, strict=True) if kept]
    cut = data.draw(st.integers(0, size))
    assert rows_of(Rollouts.cat([batch[:cut], batch[cut:]])) == plain


def test_what_does_not_fit_together_is_refused() -> None:
    batch = make([([1], [2, 3], True), ([4], [], False)])
    fields = {name: getattr(batch, name) for name in Rollouts.__dataclass_fields__}
    for changes, told in (({"texts": ("A",)}, r"\[1, 2\]"), ({"logprobs": torch.zeros(1)}, "2 tokens but 1")):
        with pytest.raises(ValueError, match=told):
            Rollouts(**{**fields, **changes})
    for index in ([2], torch.tensor([True])):
        with pytest.raises(IndexError):
            batch[index]
    with pytest.raises(ValueError, match="at least one part"):
        Rollouts.cat([])


@fast
@given(batches, st.integers(0, 3))
def test_padding_and_back_and_the_sum_of_each_row(rows: list[Any], extra: int) -> None:
    flat, lengths = ragged([tokens for _, tokens, _ in rows])
    width = max(map(len, (tokens for _, tokens, _ in rows))) + extra
    padded = pad_rows(flat, lengths, -1.0, width=width)
    assert padded.tolist() == [tokens + [-1] * (width - len(tokens)) for _, tokens, _ in rows]
    assert torch.equal(unpad(padded, lengths), flat)
    numbers = flat.float().requires_grad_()
    sums = segment_sum(numbers, lengths)
    assert sums.tolist() == [sum(tokens) for _, tokens, _ in rows]
    (sums * torch.arange(len(rows))).sum().backward()
    assert numbers.grad is not None
    assert numbers.grad.tolist() == [row for row, (_, tokens, _) in enumerate(rows) for _ in tokens]


@fast
@given(batches)
def test_a_scoring_batch_is_prompt_response_and_fill(rows: list[Any]) -> None:
    ids, predicts = scoring_batch(make(rows), fill_token_id=9)
    width = max(len(prompt) + len(tokens) for prompt, tokens, _ in rows)
    assert ids.tolist() == [[*prompt, *tokens, *[9] * width][:width] for prompt, tokens, _ in rows]
    # A token is predicted at the position before it: the first one by the prompt's last token.
    expected = [[row, len(p) - 1 + t] for row, (p, tokens, _) in enumerate(rows) for t in range(len(tokens))]
    assert predicts.nonzero().tolist() == expected


@fast
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 200))
def test_micro_batches_hold_each_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = [batch.tolist() for batch in micro_batches(lengths, budget)]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert [lengths[row] for batch in batches for row in batch] == sorted(lengths, reverse=True)
    assert all(len(batch) * lengths[batch[0]] <= budget for batch in batches)
    assert all((len(batch) + 1) * lengths[batch[0]] > budget for batch in batches[:-1])  # none could hold the next too


def test_a_row_beyond_the_budget_has_a_micro_batch_of_its_own() -> None:
    assert [batch.tolist() for batch in micro_batches([3, 9, 5], 8)] == [[1], [2], [0]]
