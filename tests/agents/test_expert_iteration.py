"""Expert iteration: what it learns, in closed form where there is one; and stopping it anywhere changes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from expert_worlds import (
    INSTRUCTIONS,
    Odd,
    Silent,
    make,
    read,
    small,
    weights,
)
from numpy.typing import NDArray
from tiny_models import build_llama
from tiny_worlds import ASCII, TEXTS, Share, load_policy
from transformers import PreTrainedTokenizerFast

from alpacafarm_env.agents.best_of_n import BestOfN, BestOfNConfig
from alpacafarm_env.agents.expert_iteration import ExpertIteration, ExpertIterationConfig, round_seed
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.loop import keyed_generator
from alpacafarm_env.agents.rollouts import ragged_split
from alpacafarm_env.agents.sft import SFT, SFTConfig
from alpacafarm_env.errors import UnscoredError
from alpacafarm_env.instructions import Demonstration, Instruction
from alpacafarm_env.templates import PromptTemplate


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_round_samples_then_trains_on_the_best(policy_folder: Path, out: Path) -> None:
    updates = list(make(policy_folder, out).updates())
    assert [metrics["step"] for metrics in updates] == list(range(1, 15))
    assert [metrics["round"] for metrics in updates] == [1] * 7 + [2] * 7
    assert [metrics.get("instructions") for metrics in updates[:7]] == [2, 4, 5, None, None, None, None]
    assert all(math.isfinite(metrics["loss"]) for metrics in updates[3:7])
    samples = BestOfN(
        load_policy(policy_folder),
        Share(ASCII),
        config=BestOfNConfig(num_samples=4),
        seed=round_seed(3, 1, "sampling"),
    ).sample(INSTRUCTIONS)
    rows = read(out)
    assert [row["response"] for row in rows] == list(samples.texts)
    assert [row["reward"] for row in rows] == samples.rewards.max(axis=1).tolist()
    assert [(row["row"], row["id"], row["instruction"]) for row in rows] == [
        (i, 10 + i, text) for i, text in enumerate(TEXTS)
    ]
    assert updates[0]["reward/best"] == pytest.approx(samples.rewards[:2].max(axis=1).mean())
    assert updates[0]["reward/mean"] == pytest.approx(samples.rewards[:2].mean())
    assert sum(metrics["tokens"] for metrics in updates[:3]) == samples.num_tokens
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == updates


def test_best_of_one_is_sft_on_the_policys_own_samples(policy_folder: Path) -> None:
    policy, seed = load_policy(policy_folder), round_seed(3, 1, "sampling")
    own = [
        policy.generate([text], generator=keyed_generator(seed, "best of n", str(text)), temperature=1.0)
        for text in INSTRUCTIONS
    ]
    demonstrations = [
        Demonstration(asked, rollouts.texts[0]) for asked, rollouts in zip(INSTRUCTIONS, own, strict=True)
    ]
    agent = make(policy_folder, config=small(num_samples=1, num_rounds=1))
    metrics = list(agent.updates())
    assert all(m["reward/best"] == m["reward/mean"] for m in metrics[:3])
    with pytest.warns(UserWarning, match="responses are cut"):
        sft = SFT(policy, demonstrations, config=small().sft, seed=round_seed(3, 1, "sft"))
    assert [m["loss"] for m in sft.updates()] == [m["loss"] for m in metrics[3:]]
    assert all(torch.equal(value, weights(agent)[name]) for name, value in policy.model.named_parameters())


def test_the_second_round_samples_from_the_updated_policy(policy_folder: Path, out: Path) -> None:
    one = make(policy_folder, config=small(num_rounds=1))
    one.learn()
    make(policy_folder, out).learn()
    second = BestOfN(
        one.policy, Share(ASCII), config=BestOfNConfig(num_samples=4), seed=round_seed(3, 2, "sampling")
    ).act(INSTRUCTIONS)
    untrained = BestOfN(
        load_policy(policy_folder),
        Share(ASCII),
        config=BestOfNConfig(num_samples=4),
        seed=round_seed(3, 2, "sampling"),
    ).act(INSTRUCTIONS)
    assert [row["response"] for row in read(out, 2)] == list(second)
    assert second != untrained
    seeds = {round_seed(3, number, purpose) for number in (1, 2) for purpose in ("sampling", "sft")}
    assert len(seeds) == 4


def test_a_response_at_the_limit_is_imitated_without_an_end(policy_folder: Path) -> None:
    """Also where the policy itself may say more: nothing teaches it to stop where sampling was cut off."""
    policy = load_policy(policy_folder, max_response_tokens=16)
    agent = make(policy, config=small(max_response_tokens=2, num_rounds=1))
    for metrics in agent.updates():
        if "loss" in metrics:
            break
    assert agent._sft is not None
    data, best = agent._sft._data, agent._best
    assert not all(row.finished for row in best)
    assert data.finished.tolist() == [row.finished for row in best]
    assert int((data.tokens == policy.tokenizer.eos_token_id).sum()) == sum(row.finished for row in best)
    assert policy.max_response_tokens == 16


def tokens_trained_on(agent: ExpertIteration) -> list[list[int]]:
    """Of each response of the first round, until its fine-tuning has begun."""
    updates = agent.updates()
    while agent._sft is None:
        next(updates)
    data = agent._sft._data
    assert len(data.logprobs) == len(data.tokens)
    return [row.tolist() for row in ragged_split(data.tokens, data.lengths)]


@pytest.mark.parametrize("change", [-1, 0, 2])
def test_the_end_follows_the_sample_whatever_its_text_encodes_to(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    """A tokenizer reads a text back as fewer or more tokens: what was cut off has no end, what ended has one."""
    policy, width = load_policy(policy_folder), 2
    policy.model.lm_head.register_forward_hook(  # about every third token ends a response
        lambda module, args, logits: logits + 5.0 * torch.nn.functional.one_hot(torch.tensor(1), logits.shape[-1])
    )
    encode, extra, eos = policy.encode_responses, 200, policy.tokenizer.eos_token_id

    def unlike(responses: Sequence[str], *, eos: bool = True) -> list[list[int]]:
        rows = [row + [extra] * change if change > 0 else row[-change:] for row in encode(responses, eos=False)]
        return [row + [policy.tokenizer.eos_token_id] * eos for row in rows]

    monkeypatch.setattr(policy, "encode_responses", unlike)
    agent = make(policy, config=small(max_response_tokens=width, num_samples=1, num_rounds=1), seed=1)
    rows = tokens_trained_on(agent)
    plain = encode([best.response or "" for best in agent._best], eos=False)
    expected = []
    for tokens, best in zip(plain, agent._best, strict=True):
        changed = tokens + [extra] * change if change > 0 else tokens[-change:]
        expected.append([*changed, eos] if best.finished else changed[:width])
    assert {best.finished for best in agent._best} == {True, False}
    assert rows == [row for row in expected if row]
    assert max(map(len, rows)) > width or change <= 0
    assert agent._sft is not None
    assert agent._sft._data.finished.tolist() == [row[-1] == eos for row in rows]
    assert policy.max_response_tokens == 4


def test_bytes_that_are_no_text_are_cut_where_sampling_was(policy_folder: Path) -> None:
    """The byte-level tokenizer decodes a stray byte to a character of three; and says <s> or <pad> without a text."""
    policy = load_policy(policy_folder)
    agent = make(policy, config=small(max_response_tokens=3, num_rounds=1, num_samples=1))
    rows = tokens_trained_on(agent)
    texts = [best.response or "" for best in agent._best]
    assert not any(best.finished for best in agent._best)
    assert any("\N{REPLACEMENT CHARACTER}" in text for text in texts)
    assert rows == [row[:3] for row in policy.encode_responses(texts, eos=False)]


def test_a_response_cut_off_before_any_text_is_left_out(policy_folder: Path) -> None:
    policy = load_policy(policy_folder)
    policy.model.lm_head.register_forward_hook(  # <pad>, which has no text, about as often as everything else
        lambda module, args, logits: logits + 6.0 * torch.nn.functional.one_hot(torch.tensor(2), logits.shape[-1])
    )
    agent = make(policy, config=small(max_response_tokens=1, num_rounds=1, num_samples=1))
    rows = tokens_trained_on(agent)
    said = [best.response for best in agent._best]
    assert 0 < said.count("") < len(said)
    assert all(rows)
    assert len(rows) == len(said) - said.count("")


def test_instructions_without_a_verdict_are_left_out_and_counted(policy_folder: Path, out: Path) -> None:
    agent = make(policy_folder, out, oracle=Silent("Hi"), config=small(num_rounds=1))
    updates = list(agent.updates())
    assert [metrics["reward/unscored"] for metrics in updates[:3]] == [0.5, 0, 0]
    assert [row["response"] is None for row in read(out)] == [False, True, False, False, False]
    assert len(updates) == 3 + 2 * math.ceil(4 / 3)
    assert sum(row["num_scored"] for row in read(out)) == 4 * 4


def test_a_chunk_without_any_verdict_has_no_means(policy_folder: Path, out: Path) -> None:
    config, oracle = small(num_rounds=1), Silent(*TEXTS[:2])
    metrics = next(make(policy_folder, out, oracle=oracle, config=config).updates())
    assert all(math.isnan(metrics[name]) for name in ("reward/best", "reward/mean", "finished"))
    written = (out / "metrics.jsonl").read_bytes()
    assert json.loads(written)["reward/best"] is None
    resumed = make(policy_folder, out, oracle=oracle, config=config)
    assert (out / "metrics.jsonl").read_bytes() == written
    assert len(list(resumed.updates())) == 2 + 2


def test_unscored_samples_are_never_the_best(policy_folder: Path, out: Path) -> None:
    make(policy_folder, out, oracle=Odd(ASCII), config=small(num_rounds=1)).learn()
    config, seed = BestOfNConfig(num_samples=4), round_seed(3, 1, "sampling")
    samples = BestOfN(load_policy(policy_folder), Odd(ASCII), config=config, seed=seed).sample(INSTRUCTIONS)
    rows = read(out)
    assert 0 < sum(row["num_scored"] for row in rows) < 5 * 4
    assert any(0 < row["num_scored"] < 4 for row in rows)
    for i, row in enumerate(rows):
        odd = [(r, text) for r, text in zip(samples.rewards[i], samples.responses[i], strict=True) if Odd.judges(text)]
        best = max((reward for reward, _ in odd), default=None)
        assert row["reward"] == best
        assert row["response"] == next((text for reward, text in odd if reward == best), None)


def test_nothing_scored_is_an_error(policy_folder: Path) -> None:
    agent = make(policy_folder, oracle=Silent())
    updates = agent.updates()
    assert all(math.isnan(next(updates)["reward/best"]) for _ in range(3))
    with pytest.raises(UnscoredError, match=r"Round 1: the oracle 'share' scored no response to any of 5 instructions"):
        next(updates)


# A world with one state -----------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnop"
NUM_QUESTIONS = 2000


class Ranks:
    """r = log F: F is the probability that the reference says a letter which is no better."""

    name = "ranks"

    def __init__(self, cumulative: NDArray[np.float64]) -> None:
        self.rewards = dict(zip(LETTERS, np.log(cumulative), strict=True))

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        return np.array([self.rewards[response] for response in responses])


def one_state_policy(tokenizer: PreTrainedTokenizerFast) -> LanguageModel:
    """Says one of 16 letters, whatever it is asked.

    Its attention is off, so that what it says depends on the prompt's last token only, which is always the same. All
    other tokens are declared control tokens, which are never said. Only the output layer trains: the loss is convex.
    """
    model = build_llama(len(tokenizer))
    letters = tokenizer.convert_tokens_to_ids(list(LETTERS))
    model.config.alpacafarm_control_tokens = sorted(set(range(len(tokenizer))) - set(letters))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        model.lm_head.weight /= 5  # no letter is nearly certain
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    template = PromptTemplate(with_input="{instruction}{input}:", without_input="{instruction}:")
    return LanguageModel(model, tokenizer, template, max_response_tokens=1)


def letter_probabilities(policy: LanguageModel) -> NDArray[np.float64]:
    with torch.no_grad():
        logits = policy.logits(policy.as_rollouts(["0"], ["a"]))[0]
    letters = policy.tokenizer.convert_tokens_to_ids(list(LETTERS))
    return logits[letters].double().softmax(-1).numpy()


def total_variation(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    return float(np.abs(p - q).sum() / 2)


def test_a_bandit_learns_the_best_of_n_distribution(tokenizer: PreTrainedTokenizerFast) -> None:
    """With F_i the reference's probability of the i letters that are no better, best-of-n says letter i with F_i^n -
    F_{i-1}^n, and SFT's optimum is the frequency of each letter among N such draws.

    That frequency's total variation from the truth is at most sqrt((K - 1) / N) / 2 in the mean (each |frequency - p|
    has a mean below sqrt(p (1 - p) / N); Cauchy-Schwarz over K letters), and with probability 1 - d at most
    sqrt(log(1 / d) / 2N) more (McDiarmid: one draw moves it by 1 / N). Here d = 1e-3.

    The tilted optimum for r = log F and β = 1 / (n - 1) is p_i F_i^(n-1) / S with S the sum. Since p_i F_i^(n-1) is at
    least the integral of u^(n-1) from F_{i-1} to F_i, which is (F_i^n - F_{i-1}^n) / n, the two distributions differ in
    total variation by at most n S - 1, by the triangle inequality over n p_i F_i^(n-1).
    """
    policy, n = one_state_policy(tokenizer), 4
    reference = letter_probabilities(policy)
    cumulative = np.minimum(reference.cumsum(), 1.0)
    best_of_n = np.diff(cumulative**n, prepend=0.0)
    tilted = reference * np.exp(np.log(cumulative) * (n - 1))  # π_ref exp(r / β)
    excess = n * tilted.sum() - 1
    tilted /= tilted.sum()
    apart = total_variation(best_of_n, tilted)
    assert apart <= excess < 0.2

    sft = SFTConfig(epochs=20, batch_size=500, learning_rate=0.02, micro_batch_tokens=10**6)
    config = ExpertIterationConfig(num_samples=n, instructions_per_step=500, sample_batch_size=2000, sft=sft)
    questions = [Instruction(str(number)) for number in range(NUM_QUESTIONS)]
    agent = ExpertIteration(policy, questions, Ranks(cumulative), config=config)
    best: list[str] = []
    for metrics in agent.updates():
        if "instructions" in metrics:
            best = [row.response or "" for row in agent._best]
    learned = letter_probabilities(policy)
    frequencies = np.array([best.count(letter) for letter in LETTERS]) / NUM_QUESTIONS
    noise = math.sqrt((len(LETTERS) - 1) / NUM_QUESTIONS) / 2 + math.sqrt(math.log(1e3) / (2 * NUM_QUESTIONS))
    assert total_variation(learned, frequencies) < 0.01  # the optimizer's share
    assert total_variation(learned, best_of_n) < noise + 0.01 < total_variation(reference, best_of_n) / 4
    assert total_variation(learned, tilted) < apart + noise + 0.01 < total_variation(reference, tilted) / 3


# Stopping and resuming ------------------------------------------------------------------------------------------------


def test_a_number_of_instructions_is_a_keyed_choice(policy_folder: Path) -> None:
    config = small(num_instructions=3)
    chosen = make(policy_folder, config=config).instructions
    assert len(set(chosen)) == 3
    assert chosen == make(policy_folder, config=config).instructions
    assert {make(policy_folder, config=config, seed=seed).instructions for seed in range(9)} != {chosen}
    assert make(policy_folder).instructions == INSTRUCTIONS
    with pytest.raises(ValueError, match="expected num_instructions=6 instructions, got 5"):
        make(policy_folder, config=small(num_instructions=6))
    with pytest.raises(ValueError, match="expected 1 or more instructions, got 0"):
        make(policy_folder, instructions=())


def test_training_is_set_in_one_place() -> None:
    with pytest.raises(ValueError, match=r"ExpertIterationConfig.learning_rate must be left alone: .*sft=SFTConfig"):
        ExpertIterationConfig(learning_rate=1e-3)
    with pytest.raises(ValueError, match=r"num_samples must be 1 or more, got 0"):
        ExpertIterationConfig(num_samples=0)
    with pytest.raises(ValueError, match=r"temperature must be above 0, got 0"):
        ExpertIterationConfig(temperature=0)


def test_presets() -> None:
    paper = ExpertIterationConfig.paper()
    assert (paper.num_samples, paper.num_rounds, paper.temperature) == (16, 1, 1.0)
    assert (paper.max_response_tokens, paper.num_instructions) == (300, None)
    assert paper.sft == SFTConfig.paper()
    assert ExpertIterationConfig.sandbox().sft.schedule == "linear"
