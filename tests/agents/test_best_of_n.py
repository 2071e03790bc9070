"""Best-of-n: the agent on real policies. What follows from theory alone is in test_best_of_n_analysis.py."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_worlds import ASCII, TEXTS, Picky, Share
from torch import nn

from alpacafarm_env import sandbox
from alpacafarm_env.agents.best_of_n import BestOfN, BestOfNConfig, BestOfNSamples, best_of_k
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


class Never(Share):
    def score(self, instructions, responses):
        return np.full(len(responses), np.nan)


def agent(policy, oracle=None, *, seed=0, **changes):
    config = replace(BestOfNConfig(num_samples=6, max_response_tokens=4), **changes)
    return BestOfN(policy, oracle or Share(ASCII), config=config, seed=seed)


def same(a: BestOfNSamples, b: BestOfNSamples) -> None:
    assert a.instructions == b.instructions
    assert a.responses == b.responses
    np.testing.assert_array_equal(a.rewards, b.rewards)
    np.testing.assert_array_equal(a.finished, b.finished)
    assert a.num_tokens == b.num_tokens


class TestSamples:
    def test_best_of_1_is_the_policys_own_sample(self, language_model):
        texts = agent(language_model, num_samples=1, temperature=0.8, seed=5).act(TEXTS)
        for instruction, text in zip(TEXTS, texts, strict=True):
            own = language_model.generate(
                [instruction],
                generator=keyed_generator(5, "best of n", instruction),
                temperature=0.8,
                max_new_tokens=4,
            )
            assert (text,) == own.texts

    def test_all_n_are_the_policys_own_samples(self, language_model):
        samples = agent(language_model).sample(TEXTS[:2])
        for row, instruction in enumerate(TEXTS[:2]):
            own = language_model.generate(
                [instruction],
                generator=keyed_generator(0, "best of n", instruction),
                max_new_tokens=4,
                num_samples=6,
            )
            assert samples.responses[row] == own.texts
            assert samples.finished[row].tolist() == own.finished.tolist()

    def test_a_smaller_n_is_the_beginning_of_a_larger_one(self, llama):
        large = agent(llama, num_samples=9).sample(TEXTS)
        small = agent(llama).sample(TEXTS, num_samples=4)
        assert small.responses == tuple(row[:4] for row in large.responses)
        np.testing.assert_array_equal(small.rewards, large.rewards[:, :4])

    @pytest.mark.parametrize("batch_size", [1, 2, 5, 16, 1000])
    def test_chunks_and_batches_change_nothing(self, language_model, batch_size):
        expected = agent(language_model).sample(TEXTS)
        found = agent(language_model, batch_size=batch_size)
        same(found.sample(TEXTS), expected)
        assert found.act(TEXTS) == expected.texts

    def test_chunks_come_in_order_and_can_be_resumed(self, llama):
        worker = agent(llama, batch_size=3)
        expected = worker.sample(TEXTS)
        chunks = list(worker.sample_chunks(TEXTS))
        assert [first for first, _ in chunks] == [0, 2, 4]  # four batches of 3 rows: two instructions of 6 samples
        assert [len(samples) for _, samples in chunks] == [2, 2, 1]
        resumed = [samples for _, samples in agent(llama, batch_size=3).sample_chunks(TEXTS[2:])]
        same(BestOfNSamples.cat([chunks[0][1], *resumed]), expected)

    def test_a_chunk_is_sampled_when_it_is_asked_for(self, llama):
        oracle = Recording()
        chunks = agent(llama, oracle, batch_size=1).sample_chunks(TEXTS)
        next(chunks)
        assert {instruction for instruction, _ in oracle.asked} == {TEXTS[0]}

    def test_tokens_are_counted_with_eos(self, llama):
        llama.model.lm_head.register_forward_hook(
            lambda module, args, logits: logits + 4.0 * nn.functional.one_hot(torch.tensor(1), logits.shape[-1])
        )
        samples = agent(llama, num_samples=20).sample(TEXTS)
        own = [
            llama.generate([i], generator=keyed_generator(0, "best of n", i), max_new_tokens=4, num_samples=20)
            for i in TEXTS
        ]
        assert samples.num_tokens == sum(len(rollouts.tokens) for rollouts in own)
        assert samples.finished.any()
        assert not samples.finished.all()

    def test_no_instructions(self, llama):
        samples = agent(llama).sample(())
        assert samples.texts == ()
        assert samples.rewards.shape == (0, 6)
        assert agent(llama).act(()) == ()


class TestScores:
    def test_the_best_is_the_first_of_the_highest_and_all_rewards_are_kept(self, llama):
        oracle = Share(ASCII)
        samples = agent(llama, oracle, num_samples=12).sample(TEXTS)
        assert samples.rewards.shape == (5, 12)
        assert samples.rewards.dtype == np.float64
        for row, instruction in enumerate(TEXTS):
            rewards = oracle.score([instruction] * 12, samples.responses[row]).tolist()
            assert samples.rewards[row].tolist() == rewards
            assert samples.best[row] == rewards.index(max(rewards))
            assert samples.texts[row] == samples.responses[row][rewards.index(max(rewards))]
        assert any(row.tolist().count(row.max()) > 1 for row in samples.rewards)  # there are equals to choose from

    def test_distinct_texts_are_scored_once(self, llama):
        llama.model.lm_head.weight.data *= 8  # nearly greedy: texts repeat
        oracle = Recording()
        samples = agent(llama, oracle, num_samples=40, max_response_tokens=2).sample([*TEXTS, TEXTS[0]])
        pairs = {(i, text) for i, row in zip(samples.instructions, samples.responses, strict=True) for text in row}
        assert sorted(oracle.asked) == sorted(pairs)
        assert len(pairs) < 5 * 40 / 2
        assert samples.responses[0] == samples.responses[5]
        np.testing.assert_array_equal(samples.rewards[0], samples.rewards[5])

    def test_one_text_with_and_without_an_input_is_two_questions(self, llama):
        llama.model.lm_head.weight.data *= 50
        inputs = []

        class Inputs(Share):
            def score(self, instructions, responses):
                inputs.extend(instruction.input for instruction in instructions)
                return np.array([float(len(instruction.input)) for instruction in instructions])

        samples = agent(llama, Inputs("")).sample([Instruction("Say\n\nso"), Instruction("Say", "so")])
        assert set(inputs) == {"", "so"}
        np.testing.assert_array_equal(samples.rewards, [[0.0] * 6, [2.0] * 6])

    def test_unscored_samples_are_never_the_best(self, llama):
        llama.model.lm_head.register_forward_hook(
            lambda module, args, logits: logits + 4.0 * nn.functional.one_hot(torch.tensor(1), logits.shape[-1])
        )
        samples = agent(llama, Picky(ASCII, sign=-1.0), num_samples=30).sample(TEXTS)
        unscored = np.isnan(samples.rewards)
        assert unscored.any(axis=1).all()
        for row, best in enumerate(samples.best):
            assert len(samples.texts[row]) % 2 == 1
            assert samples.rewards[row, best] == np.nanmax(samples.rewards[row])

    def test_no_score_at_all_is_an_error_that_names_the_instruction(self, llama):
        samples = agent(llama, Never("")).sample(TEXTS[1:2])
        assert np.isnan(samples.rewards).all()
        with pytest.raises(UnscoredError, match="none of the 6 responses to instruction 0, 'Hi'"):
            _ = samples.texts
        with pytest.raises(UnscoredError):
            agent(llama, Never("")).act(TEXTS)

    def test_a_broken_oracle_is_refused(self, llama):
        class Broken(Share):
            def score(self, instructions, responses):
                return np.full(len(responses), np.inf)

        with pytest.raises(OracleError, match="finite"):
            agent(llama, Broken("")).act(TEXTS)

    def test_the_best_of_more_is_better(self, llama):
        rewards = agent(llama, num_samples=64).sample(TEXTS).rewards
        means = [rewards[:, :n].max(axis=1).mean() for n in (1, 4, 16, 64)]
        assert means == sorted(means)
        assert means[0] < means[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 0}, "num_samples must be 1 or more, got 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": math.nan}, "temperature must be above 0"),
        ({"max_response_tokens": 0}, "max_response_tokens must be"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BestOfNConfig(**changes)


def test_bad_calls_are_refused(llama):
    with pytest.raises(ValueError, match="num_samples must be 1 or more, got 0"):
        agent(llama).sample(TEXTS, num_samples=0)
    with pytest.raises(ValueError, match="expected parts of one number of samples, got no parts"):
        BestOfNSamples.cat([])
    with pytest.raises(ValueError, match=r"expected parts of one number of samples, got \[2, 3\]"):
        BestOfNSamples.cat([agent(llama).sample(TEXTS, num_samples=n) for n in (2, 3)])
    with pytest.raises(ValueError, match="the model knows 256 positions"):
        agent(llama, max_response_tokens=300).act(TEXTS)


def test_presets():
    assert BestOfNConfig.paper() == BestOfNConfig(num_samples=1024, temperature=1.0, max_response_tokens=None)
    assert BestOfNConfig.sandbox().max_response_tokens is not None


def test_each_prompt_is_read_once_however_many_batches_it_fills(llama):
    shapes = []
    llama.model.register_forward_pre_hook(
        lambda module, args, options: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    agent(llama, num_samples=1024, batch_size=256, max_response_tokens=3).sample(TEXTS)
    prompts = llama.encode_prompts(TEXTS)
    read = [(rows, width) for rows, width in shapes if width > 1]
    assert read == [(1, len(prompt)) for prompt in prompts]
    assert max(rows for rows, width in shapes if width == 1) == 256


def test_the_winner_follows_the_law_of_best_of_n(llama):
    """One token long, a response has a known probability; so has the best of n, and what it wins against one sample."""
    llama.model.lm_head.weight.data *= 0.3
    prompt = torch.tensor(llama.encode_prompts(TEXTS[:1]))
    with torch.no_grad():
        probabilities = llama.model(prompt).logits[0, -1].double().softmax(-1).numpy()
    texts = [llama.tokenizer.decode([token], skip_special_tokens=True) for token in range(len(probabilities))]

    class Rank(Share):  # every text's place in the alphabet: equals are one response
        def score(self, instructions, responses):
            return np.array([places[response] for response in responses], np.float64)

    places = {text: place for place, text in enumerate(sorted(set(texts)))}
    mass = np.bincount([places[text] for text in texts], weights=probabilities)
    below = np.concatenate([[0.0], np.cumsum(mass)])
    wins = below[:-1] + mass / 2  # against a fresh sample, ties counting half
    size = 4096
    samples = agent(llama, Rank(""), max_response_tokens=1, batch_size=size).sample(TEXTS[:1], num_samples=size)
    ks = (1, 2, 4, 16)
    found = best_of_k(samples.rewards, wins[samples.rewards.astype(int)], ks)[:, 0]
    for k, value in zip(ks, found, strict=True):
        winner = below[1:] ** k - below[:-1] ** k
        exact = float(winner @ wins)
        assert exact < k / (k + 1) + 1e-12
        # The estimator is an average over size // k disjoint sets and more, so its error is below theirs: 4 of them.
        margin = 4 * math.sqrt(float(winner @ (wins - exact) ** 2) / (size // k))
        assert abs(value - exact) < margin
        assert margin < 0.06


MEASURE = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
from alpacafarm_env import sandbox
from alpacafarm_env.agents.best_of_n import BestOfN, BestOfNConfig
from alpacafarm_env.oracles.reward_model import RewardModel
n, prompts = map(int, sys.argv[1:])
instructions = (sandbox.SANDBOX.instructions("val") + sandbox.SANDBOX.instructions("eval"))[:prompts]
config = BestOfNConfig(num_samples=n, max_response_tokens=64)
start = time.perf_counter()
answers = BestOfN(sandbox.POLICY, RewardModel(sandbox.REWARD_MODEL), config=config).act(instructions)
print(json.dumps({
    "answers": len(answers),
    "distinct": len(set(answers)),
    "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    "seconds": time.perf_counter() - start,
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
@pytest.mark.parametrize(("n", "prompts"), [(256, 8), pytest.param(1024, 100, marks=pytest.mark.slow)])
def test_memory_stays_under_2_gib(n, prompts):
    """In a process of its own: the peak of this one belongs to other tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(n), str(prompts)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,  # the assertion shows what the process said
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    print(found)
    assert found["answers"] == prompts
    assert found["distinct"] > prompts / 2
    assert found["gib"] < 2


def test_the_shipped_policy_gets_better_by_its_surrogate():
    instructions = sandbox.SANDBOX.instructions("val")[:12]
    gold = sandbox.gold_oracle()
    samples = agent(sandbox.POLICY, gold, max_response_tokens=64, num_samples=16).sample(instructions)
    one, best = best_of_k(samples.rewards, samples.rewards, (1, 16))
    assert (best >= one).all()
    assert best.mean() > one.mean() + 0.5
    np.testing.assert_allclose(gold.score(instructions, samples.texts), best)
