"""Best-of-n: the agent on real policies, its estimates, and the KL of choosing."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_worlds import ASCII, TEXTS, Share, say_more

from alpacafarm_env.agents.best_of_n import BestOfN, BestOfNConfig, BestOfNSamples, best_of_k, best_of_n_kl
from alpacafarm_env.agents.loop import keyed_generator
from alpacafarm_env.errors import UnscoredError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles.base import OracleError


class Recording(Share):
    """Remembers every pair it was asked about."""

    def __init__(self, characters=ASCII):
        super().__init__(characters)
        self.asked = []

    def score(self, instructions, responses):
        self.asked += zip(instructions, responses, strict=True)
        return super().score(instructions, responses)


class Scored(Share):
    """Every response by one function of it and its instruction."""

    def __init__(self, function):
        super().__init__("")
        self.function = function

    def score(self, instructions, responses):
        return np.array([self.function(*pair) for pair in zip(instructions, responses, strict=True)], np.float64)


def agent(policy, oracle=None, *, seed=0, **changes):
    config = replace(BestOfNConfig(num_samples=6, max_response_tokens=4), **changes)
    return BestOfN(policy, oracle or Share(ASCII), config=config, seed=seed)


def same(a: BestOfNSamples, b: BestOfNSamples) -> None:
    assert (a.instructions, a.responses, a.num_tokens) == (b.instructions, b.responses, b.num_tokens)
    np.testing.assert_array_equal(a.rewards, b.rewards)
    np.testing.assert_array_equal(a.finished, b.finished)


@pytest.mark.parametrize(("num_samples", "temperature"), [(1, 0.8), (20, 1.0)])
def test_all_n_are_the_policys_own_samples(language_model, num_samples, temperature):
    say_more(language_model.model, language_model.tokenizer.eos_token_id, 4.0)
    worker = agent(language_model, num_samples=num_samples, temperature=temperature, seed=5)
    samples = worker.sample(TEXTS)
    own = [
        language_model.generate(
            [text],
            generator=keyed_generator(5, "best of n", text),
            temperature=temperature,
            max_new_tokens=4,
            num_samples=num_samples,
        )
        for text in TEXTS
    ]
    assert samples.responses == tuple(rollouts.texts for rollouts in own)
    assert samples.finished.tolist() == [rollouts.finished.tolist() for rollouts in own]
    assert samples.num_tokens == sum(len(rollouts.tokens) for rollouts in own)  # EOS included
    assert worker.act(TEXTS) == samples.texts
    assert num_samples == 1 or 0 < samples.finished.sum() < samples.finished.size


def test_a_smaller_n_is_the_beginning_of_a_larger_one(llama):
    large, small = agent(llama, num_samples=9).sample(TEXTS), agent(llama).sample(TEXTS, num_samples=4)
    assert small.responses == tuple(row[:4] for row in large.responses)
    np.testing.assert_array_equal(small.rewards, large.rewards[:, :4])


@pytest.mark.parametrize("batch_size", [1, 5, 16])
def test_chunks_batches_and_the_order_of_instructions_change_nothing(language_model, batch_size):
    expected = agent(language_model).sample(TEXTS)
    found = agent(language_model, batch_size=batch_size)
    same(found.sample(TEXTS), expected)
    assert found.sample(TEXTS[::-1]).responses == expected.responses[::-1]
    assert agent(language_model, seed=1).sample(TEXTS).responses != expected.responses


def test_chunks_are_sampled_when_asked_for_in_order_and_can_be_resumed(llama):
    oracle = Recording()
    begun = agent(llama, oracle, batch_size=3).sample_chunks(TEXTS)
    first = next(begun)
    assert {instruction for instruction, _ in oracle.asked} == set(TEXTS[:2])
    chunks = [first, *begun]
    # Four batches of 3 rows: two instructions of 6 samples.
    assert [(start, len(samples)) for start, samples in chunks] == [(0, 2), (2, 2), (4, 1)]
    resumed = [samples for _, samples in agent(llama, batch_size=3).sample_chunks(TEXTS[2:])]
    same(BestOfNSamples.cat([chunks[0][1], *resumed]), agent(llama, batch_size=3).sample(TEXTS))


def test_the_best_is_the_first_of_the_highest_and_all_rewards_are_kept(llama):
    oracle = Share(ASCII)
    samples = agent(llama, oracle, num_samples=12).sample(TEXTS)
    assert samples.rewards.dtype == np.float64
    for row, instruction in enumerate(TEXTS):
        rewards = oracle.score([instruction] * 12, samples.responses[row]).tolist()
        assert samples.rewards[row].tolist() == rewards
        assert samples.best[row] == rewards.index(max(rewards))
        assert samples.texts[row] == samples.responses[row][rewards.index(max(rewards))]
    assert any(row.tolist().count(row.max()) > 1 for row in samples.rewards)  # there are equals to choose from


def test_distinct_texts_are_scored_once(llama):
    llama.model.lm_head.weight.data *= 8  # nearly greedy: texts repeat
    oracle = Recording()
    samples = agent(llama, oracle, num_samples=40, max_response_tokens=2).sample([*TEXTS, TEXTS[0]])
    pairs = {(i, text) for i, row in zip(samples.instructions, samples.responses, strict=True) for text in row}
    assert sorted(oracle.asked) == sorted(pairs)
    assert len(pairs) < 5 * 40 / 2
    assert samples.responses[0] == samples.responses[5]
    np.testing.assert_array_equal(samples.rewards[0], samples.rewards[5])


def test_one_text_with_and_without_an_input_is_two_questions(llama):
    llama.model.lm_head.weight.data *= 50
    oracle = Scored(lambda instruction, response: len(instruction.input))
    samples = agent(llama, oracle).sample([Instruction("Say\n\nso"), Instruction("Say", "so")])
    np.testing.assert_array_equal(samples.rewards, [[0.0] * 6, [2.0] * 6])


def test_no_score_or_a_broken_one_is_an_error_that_names_the_instruction(llama):
    samples = agent(llama, Scored(lambda *_: math.nan)).sample(TEXTS[1:2])
    assert np.isnan(samples.rewards).all()
    with pytest.raises(UnscoredError, match="6 responses to instruction 0, 'Hi'"):
        _ = samples.texts
    with pytest.raises(OracleError, match="finite"):
        agent(llama, Scored(lambda *_: math.inf)).act(TEXTS)


def test_no_instructions_and_calls_that_cannot_be(llama):
    empty = agent(llama).sample(())
    assert (empty.texts, empty.rewards.shape) == ((), (0, 6))
    with pytest.raises(ValueError, match="num_samples.* 0"):
        agent(llama).sample(TEXTS, num_samples=0)
    with pytest.raises(ValueError, match="256 positions"):
        agent(llama, max_response_tokens=300).act(TEXTS)


NAN = math.nan


@pytest.mark.parametrize(
    ("size", "n", "kl"),  # on that many equally likely responses with different rewards
    [
        *((10_000, n, kl) for n, kl in ((2, 0.19315), (4, 0.63629), (16, 1.83509), (64, 3.17451))),
        *((8, n, kl) for n, kl in ((2, 0.187), (4, 0.625), (16, 1.680), (64, 2.078))),
    ],
)
def test_kl_is_a_bound_and_tight_where_responses_are_rare(size, n, kl):
    law = np.diff(np.linspace(0, 1, size + 1) ** n)  # P(the best of n draws is outcome i), by ascending reward
    law = law[law > 0]
    exact = float(np.sum(law * np.log(law * size)))
    assert exact == pytest.approx(kl, abs=5e-4 if size == 8 else 5e-6)
    assert exact < best_of_n_kl(n)
    assert best_of_n_kl(n) < exact + 1e-3 if size == 10_000 else best_of_n_kl(n) > exact + 0.005


def brute_force(rewards, values, k):
    """The mean over all sets of k scored samples of a set's value: the mean value of its samples of highest reward."""
    sets = list(combinations([i for i, reward in enumerate(rewards) if not math.isnan(reward)], k))
    total = 0.0
    for chosen in sets:
        tied = [values[i] for i in chosen if rewards[i] == max(rewards[j] for j in chosen)]
        total += sum(tied) / len(tied)
    return total / len(sets) if sets else NAN


@settings(max_examples=60)
@given(st.data())
def test_estimator_equals_all_subsets_in_any_order(data):
    """With equals among the rewards and samples that have none."""
    size = data.draw(st.integers(1, 7))
    reward = st.one_of(st.integers(0, 3).map(float), st.floats(-9, 9), st.just(NAN))
    rewards = np.array(data.draw(st.lists(reward, min_size=size, max_size=size)))
    values = np.array(data.draw(st.lists(st.floats(-9, 9), min_size=size, max_size=size)))
    ks = range(1, size + 1)
    found = best_of_k(rewards[None], values[None], ks)
    np.testing.assert_allclose(found[:, 0], [brute_force(rewards, values, k) for k in ks], rtol=0, atol=1e-12)
    order = data.draw(st.permutations(range(size)))
    np.testing.assert_array_equal(best_of_k(rewards[None, order], values[None, order], ks), found)  # to the last bit


def test_many_samples_stay_finite_and_monotone_and_the_ends_are_the_mean_and_the_best():
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(size=(4, 12_600)).round(2), rng.normal(size=(4, 12_600))  # equals among them
    means = best_of_k(rewards, rewards, [2**i for i in range(14)])
    assert (np.diff(means, axis=0) > 0).all()
    assert np.isfinite(means).all()
    rewards = rng.normal(size=(4, 12_600))
    one, every = best_of_k(rewards, values, (1, 12_600))
    np.testing.assert_allclose(one, values.mean(axis=1), atol=1e-12)
    np.testing.assert_array_equal(every, values[np.arange(4), rewards.argmax(axis=1)])


def test_a_missing_value_counts_only_where_it_can_be_the_best():
    found = best_of_k([[1.0, 2.0, 3.0]], [[NAN, 5.0, 7.0]], (1, 2, 3))
    assert math.isnan(found[0, 0])
    np.testing.assert_allclose(found[1:, 0], [(5 + 7 + 7) / 3, 7.0])


@pytest.mark.parametrize(
    ("rewards", "values", "ks", "told"),
    [
        ([1.0], [1.0], (1,), r"\[N, n\], got \(1,\), \(1,\)"),
        ([[1.0, 2.0]], [[1.0]], (1,), r"got \(1, 2\), \(1, 1\)"),
        ([[1.0, np.inf]], [[1.0, 1.0]], (1,), "finite"),
        ([[1.0, 2.0]], [[1.0, 2.0]], (0, 1, 3), r"2 samples.*\[0, 3\]"),
    ],
)
def test_bad_input_is_refused(rewards, values, ks, told):
    with pytest.raises(ValueError, match=told):
        best_of_k(rewards, values, ks)
