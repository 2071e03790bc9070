"""A policy in this process as a judge: a pool's prompts, a rating from 1 to 7, and what the registry makes of both."""

import json
from itertools import pairwise, product

import gymnasium as gym
import numpy as np
import pytest
import torch
from tiny_worlds import TEMPLATE, TEXTS, TinyDataset, build_llama, say_more

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.policy_agent import PolicyActor
from alpacafarm_env.agents.sft import SFT, SFTConfig
from alpacafarm_env.annotators import PolicyPool, load_pool, make_pool
from alpacafarm_env.annotators.config import AnnotatorConfig, PoolConfig, load_prompt
from alpacafarm_env.annotators.prompts import Item, read, render
from alpacafarm_env.errors import CheckpointError, UnscoredError
from alpacafarm_env.instructions import Instruction, Rating
from alpacafarm_env.oracles import make_oracle
from alpacafarm_env.oracles.policies import PolicyRating, rating_demonstrations, rating_question

ANSWERS = [f"{text[::-1]} {'!' * (3 * n % 7)}" for n, text in enumerate(TEXTS)]
ROWS = list(zip(*[(x, *pair) for x, pair in product(TEXTS, [*pairwise(ANSWERS), ("x", "x")])], strict=True))
"""Instructions, a and b; one pair in five is of equal texts."""


class Longer(LanguageModel):
    """Reads the pool's prompt back, and replies in its format that the longer output is better; never to "Hi"."""

    def generate(self, instructions, *, generator, temperature, max_new_tokens):
        replies = []
        for text in instructions:
            name, (item,) = read(str(text))
            second = len(item.second) > len(item.first)
            reply = f"Output ({'b' if second else 'a'})"
            if load_prompt(name).format == "json":
                reply = json.dumps([{"explanation": "", "a_better": not second}])
            replies.append("Hm." if item.instruction == "Hi" else reply)
        made = self.as_rollouts(instructions, replies)
        assert generator.shape == (len(instructions), max_new_tokens)
        assert bool((made.lengths <= max_new_tokens).all())
        return made


@pytest.fixture(scope="module")
def reader(tokenizer):
    """Reads long prompts."""
    model = build_llama(len(tokenizer), max_positions=16_384)
    return LanguageModel(model, tokenizer, TEMPLATE, max_prompt_tokens=16_000, max_response_tokens=60)


def test_a_policy_answers_for_the_annotators_that_a_served_pool_draws(reader, monkeypatch, tmp_path):
    monkeypatch.setattr(reader, "__class__", Longer)
    judge = PolicyPool("eval", PolicyActor(reader), seed=3)
    verdicts = judge.judge(*ROWS)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    served = make_pool("eval", seed=3, ledger=tmp_path / "ledger")
    names = [each.name for each in load_pool("eval").annotators]
    for row, asked in enumerate(served.questions(*ROWS)):
        x, a, b = (column[row] for column in ROWS)
        found = {key: values[row] for key, values in verdicts.details.items()}
        if asked is None:
            assert (verdicts.scores[row], found) == (0.5, judge.blank)
            continue
        first = "a" if asked.item.first == a else "b"
        assert (found["annotator"], found["shown_first"]) == (names[asked.annotator], first)
        if x == "Hi":
            assert np.isnan(verdicts.scores[row])
            assert "Unparsable" in found["unscored_reason"]
        else:
            longer = len(b) > len(a) if first == "a" else not len(a) > len(b)
            assert (verdicts.scores[row], found["unscored_reason"]) == (longer, "")
    assert len(set(verdicts.details["annotator"])) > 6
    np.testing.assert_array_equal(judge.compare(ROWS[0], ROWS[2], ROWS[1]), 1 - verdicts.scores)


def test_probabilities_of_a_letter_are_the_models_own(reader, tokenizer):
    """Of a model that mostly says a or b; of any other, no verdict."""
    rows = ROWS[0][:4], ROWS[1][:4], ROWS[2][:4]
    none = PolicyPool("weighted", reader).judge(*rows)
    assert np.isnan(none.scores).all()
    assert all("probability" in reason for reason in none.details["unscored_reason"])
    model = build_llama(len(tokenizer), max_positions=16_384)
    ids = tokenizer.convert_tokens_to_ids(["a", "b"])
    for token in ids:
        say_more(model, token, 12.0)
    policy = LanguageModel(model, tokenizer, TEMPLATE, max_prompt_tokens=16_000, max_response_tokens=60)
    judge = PolicyPool("weighted", policy)
    verdicts = judge.judge(*rows)
    prompt = judge._prompts[0]
    for row, (x, a, b) in enumerate(zip(*rows, strict=True)):
        pair = (x, a, b) if verdicts.details["shown_first"][row] == "a" else (x, b, a)
        (tokens,) = policy.encode_prompts([render(prompt, [Item(*pair)], "completion")])
        chances = model(torch.tensor([tokens])).logits[0, -1].softmax(-1)[ids].detach()
        second = float(chances[1] / chances.sum())
        assert verdicts.scores[row] == pytest.approx(second if pair[1] == a else 1 - second, abs=1e-5)


def test_replies_are_keyed_on_the_pair_and_long_prompts_have_no_verdict(reader, llama):
    """The reply that is no verdict stands in the reason."""
    member = AnnotatorConfig(name="one", role="any", prompt="chatgpt_4", max_tokens=4)
    pool = PoolConfig(name="mine", annotators=(member,))

    def replies(seed, *numbers):
        rows = ([column[n] for n in numbers] for column in ROWS)
        return PolicyPool(pool, reader, seed=seed, in_order=True).judge(*rows).details["unscored_reason"].tolist()

    assert replies(1, 0, 1) == replies(1, 0) + replies(1, 1) != replies(2, 0, 1)
    short = PolicyPool("eval", llama).judge(*ROWS)
    asked = short.details["annotator"] != ""
    assert np.isnan(short.scores[asked]).all()
    assert all("max_prompt_tokens" in reason for reason in short.details["unscored_reason"][asked])


@pytest.fixture
def rater(llama, tokenizer):
    """Likes to say 2, and more so 6."""
    for digit, bonus in (("2", 14.0), ("6", 15.0)):
        say_more(llama.model, tokenizer.convert_tokens_to_ids(digit), bonus)
    llama.max_prompt_tokens = 150
    return llama


def test_a_rating_is_expected_over_the_digits(rater, tokenizer):
    responses = ["x" * 90, *ANSWERS[1:]]
    verdicts = PolicyRating(PolicyActor(rater)).judge(TEXTS, responses)
    assert np.isnan(verdicts.scores[0])
    assert "max_prompt_tokens" in verdicts.details["unscored_reason"][0]
    ids = tokenizer.convert_tokens_to_ids(list("1234567"))
    for row in range(1, 5):
        (tokens,) = rater.encode_prompts([rating_question(TEXTS[row], responses[row])])
        chances = rater.model(torch.tensor([tokens])).logits[0, -1].softmax(-1)[ids].detach().double()
        expected = float(chances @ torch.arange(1.0, 8.0).double() / chances.sum())
        assert verdicts.scores[row] == pytest.approx(expected, abs=1e-5)
    assert np.ptp(verdicts.scores[1:]) > 0.01


def test_a_policy_learns_to_rate_from_ratings(llama):
    """Untrained it gives no verdict; then it tells good from bad, and still answers what is no question of a rating."""
    texts = ["good", "bad"]
    oracle = PolicyRating(llama)
    none = oracle.judge(["Say it."] * 2, texts)
    assert np.isnan(none.scores).all()
    assert all("probability" in reason for reason in none.details["unscored_reason"])
    ratings = [Rating(Instruction(x), y, 7 if y == "good" else 2) for x in ("Say it.", "Hm?") for y in texts]
    data = rating_demonstrations(ratings)
    assert [each.response for each in data] == ["7", "2", "7", "2"]
    SFT(llama, data, config=SFTConfig(epochs=40, batch_size=4, learning_rate=1e-2)).learn()
    np.testing.assert_allclose(oracle.score(["Say it."] * 2, texts), [7, 2], atol=0.5)


def test_digits_need_tokens_of_their_own(llama, monkeypatch):
    monkeypatch.setattr(llama, "encode_responses", lambda texts, *, eos: [[5, 6]] * len(texts))
    with pytest.raises(ValueError, match="1 different tokens"):
        PolicyRating(llama)


@pytest.mark.parametrize("kind", ["pool", "rating"])
def test_the_registry_takes_policies_and_folders(rater, tmp_path, kind):
    def spec(policy, key="policy"):
        return {"pool": "greedy", key: policy} if kind == "pool" else {"rating": {key: policy}}

    dataset = TinyDataset()
    oracle = make_oracle(spec(rater), dataset=dataset)
    assert make_oracle(spec(rater), dataset=dataset) is not oracle  # what holds an object is nobody else's
    rater.save(tmp_path / "policy")
    stored = make_oracle(spec(str(tmp_path / "policy")), dataset=dataset)
    assert make_oracle(spec(tmp_path / "policy"), dataset=dataset) is stored
    (tmp_path / "policy" / "new").write_text("")
    assert make_oracle(spec(str(tmp_path / "policy")), dataset=dataset) is not stored
    env = gym.make("AlpacaFarm-PPO-v0", dataset=dataset, oracle=spec(rater))
    with pytest.raises(TypeError, match="save it"):  # the spec has no copy of the policy
        gym.make(env.spec)
    env.reset(seed=0)
    with pytest.raises(UnscoredError, match="max_prompt_tokens"):
        env.step("b" * 200)
    for policy in (5, LanguageModel):
        with pytest.raises(TypeError, match="policy that judges"):
            gym.make("AlpacaFarm-PPO-v0", dataset=dataset, oracle=spec(policy))
    with pytest.raises(CheckpointError, match="no/where"):
        make_oracle(spec("no/where"), dataset=dataset)
    with pytest.raises(ValueError, match="polcy"):
        make_oracle(spec(rater, "polcy"), dataset=dataset)
