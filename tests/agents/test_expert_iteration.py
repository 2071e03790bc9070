"""Expert iteration: what it learns, in closed form where there is one; and stopping it anywhere changes nothing."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from agent_worlds import INSTRUCTIONS, Odd, Silent, read
from agent_worlds import make_expert_iteration as make
from agent_worlds import small_expert as small
from numpy.typing import NDArray
from tiny_models import build_llama, say_more
from tiny_worlds import ASCII, TEXTS, Share, load_policy
from torch import nn
from transformers import PreTrainedTokenizerFast

from alpacafarm_env.agents.best_of_n import BestOfN, BestOfNConfig
from alpacafarm_env.agents.expert_iteration import ExpertIteration, ExpertIterationConfig, round_seed
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.rollouts import ragged_split
from alpacafarm_env.agents.sft import SFTConfig
from alpacafarm_env.errors import UnscoredError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.templates import PromptTemplate


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def best_of_4(policy: LanguageModel, oracle: Share | None = None, *, number: int = 1) -> BestOfN:
    """What a round of the runs below samples from its policy."""
    seed = round_seed(3, number, "sampling")
    return BestOfN(policy, oracle or Share(ASCII), config=BestOfNConfig(num_samples=4), seed=seed)


def test_a_round_samples_then_trains_on_the_best(policy_folder: Path, out: Path) -> None:
    updates = list(make(policy_folder, out).updates())
    assert [metrics["step"] for metrics in updates] == list(range(1, 15))
    assert [metrics["round"] for metrics in updates] == [1] * 7 + [2] * 7
    assert [metrics.get("instructions") for metrics in updates[:7]] == [2, 4, 5, None, None, None, None]
    assert all(math.isfinite(metrics["loss"]) for metrics in updates[3:7])
    samples = best_of_4(load_policy(policy_folder)).sample(INSTRUCTIONS)
    rows = read(out)
    assert [row["response"] for row in rows] == list(samples.texts)
    assert [row["reward"] for row in rows] == samples.rewards.max(axis=1).tolist()
    for i, (row, text) in enumerate(zip(rows, TEXTS, strict=True)):
        assert (row["row"], row["id"], row["instruction"]) == (i, 10 + i, text)
    assert updates[0]["reward/best"] == pytest.approx(samples.rewards[:2].max(axis=1).mean())
    assert updates[0]["reward/mean"] == pytest.approx(samples.rewards[:2].mean())
    assert sum(metrics["tokens"] for metrics in updates[:3]) == samples.num_tokens
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == updates


def test_the_second_round_samples_from_the_updated_policy(policy_folder: Path, out: Path) -> None:
    one = make(policy_folder, config=small(num_rounds=1))
    one.learn()
    make(policy_folder, out).learn()
    second, untrained = (
        best_of_4(policy, number=2).act(INSTRUCTIONS) for policy in (one.policy, load_policy(policy_folder))
    )
    assert [row["response"] for row in read(out, 2)] == list(second)
    assert second != untrained
    seeds = {round_seed(3, number, purpose) for number in (1, 2) for purpose in ("sampling", "sft")}
    assert len(seeds) == 4


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
    encode, extra, eos = policy.encode_responses, 200, policy.tokenizer.eos_token_id
    say_more(policy.model, eos, 5.0)  # about every third token ends a response

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
    assert policy.max_response_tokens == 4  # it may say more than was sampled here


def test_a_response_cut_off_before_any_text_is_left_out(policy_folder: Path) -> None:
    policy = load_policy(policy_folder)
    say_more(policy.model, policy.tokenizer.pad_token_id, 6.0)  # which has no text, as often as everything else
    agent = make(policy, config=small(max_response_tokens=1, num_rounds=1, num_samples=1))
    rows = tokens_trained_on(agent)
    said = [best.response for best in agent._best]
    assert 0 < said.count("") < len(said)
    assert all(rows)
    assert len(rows) == len(said) - said.count("")


def test_instructions_and_chunks_without_a_verdict_are_left_out_and_counted(policy_folder: Path, out: Path) -> None:
    config, oracle = small(num_rounds=1), Silent(*TEXTS[:3])
    updates = make(policy_folder, out, oracle=oracle, config=config).updates()
    first = [next(updates), next(updates)]
    assert [metrics["reward/unscored"] for metrics in first] == [1, 0.5]
    assert all(math.isnan(first[0][name]) for name in ("reward/best", "reward/mean", "finished"))
    written = (out / "metrics.jsonl").read_bytes()
    assert json.loads(written.splitlines()[0])["reward/best"] is None
    updates.close()  # type: ignore[attr-defined]
    resumed = make(policy_folder, out, oracle=oracle, config=config)
    assert (out / "metrics.jsonl").read_bytes() == written
    assert len(list(resumed.updates())) == 1 + 2  # a chunk, and two epochs of two responses
    assert [row["response"] is None for row in read(out)] == [True, True, True, False, False]
    assert [row["num_scored"] for row in read(out)] == [0, 0, 0, 4, 4]


def test_unscored_samples_are_never_the_best(policy_folder: Path, out: Path) -> None:
    make(policy_folder, out, oracle=Odd(ASCII), config=small(num_rounds=1)).learn()
    samples = best_of_4(load_policy(policy_folder), Odd(ASCII)).sample(INSTRUCTIONS)
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
    with pytest.raises(UnscoredError, match=r"Round 1.*'share'.* 5 instructions"):
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
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    model.requires_grad_(False).lm_head.weight /= 5  # no letter is nearly certain
    model.lm_head.requires_grad_(True)
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


def test_a_number_of_instructions_is_a_keyed_choice(policy_folder: Path) -> None:
    config = small(num_instructions=3)
    chosen = make(policy_folder, config=config).instructions
    assert len(set(chosen)) == 3
    assert chosen == make(policy_folder, config=config).instructions
    assert {make(policy_folder, config=config, seed=seed).instructions for seed in range(9)} != {chosen}
    assert make(policy_folder).instructions == INSTRUCTIONS
    with pytest.raises(ValueError, match="num_instructions=6 .* 5"):
        make(policy_folder, config=small(num_instructions=6))
    with pytest.raises(ValueError, match="got 0"):
        make(policy_folder, instructions=())
