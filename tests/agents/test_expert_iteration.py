"""Expert iteration: what it learns; stopped it ends as if it had not been."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_worlds import INSTRUCTIONS, Counting, Silent, files, read
from agent_worlds import make_expert_iteration as make
from agent_worlds import small_expert as small
from tiny_worlds import ASCII, TEXTS, Share, load_policy, say_more

from alpacafarm_env.agents.best_of_n import BestOfN, BestOfNConfig
from alpacafarm_env.agents.expert_iteration import ExpertIteration, round_seed
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.rollouts import ragged_split
from alpacafarm_env.errors import CheckpointError, UnscoredError


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
    plain = encode([best["response"] for best in agent._best], eos=False)
    expected = []
    for tokens, best in zip(plain, agent._best, strict=True):
        changed = tokens + [extra] * change if change > 0 else tokens[-change:]
        expected.append([*changed, eos] if best["finished"] else changed[:width])
    assert {best["finished"] for best in agent._best} == {True, False}
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
    said = [best["response"] for best in agent._best]
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


def test_nothing_scored_is_an_error(policy_folder: Path) -> None:
    agent = make(policy_folder, oracle=Silent())
    updates = agent.updates()
    assert all(math.isnan(next(updates)["reward/best"]) for _ in range(3))
    with pytest.raises(UnscoredError, match=r"Round 1.*'share'.* 5 instructions"):
        next(updates)


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


def test_stored_chunks_are_not_sampled_again(policy_folder: Path, out: Path) -> None:
    first, second = Counting(), Counting()
    updates = make(policy_folder, out, oracle=first).updates()
    next(updates), next(updates)
    del updates  # while it may go on, the folder is its own
    make(policy_folder, out, oracle=second, config=small()).learn()
    assert first.asked == list(TEXTS[:4])
    assert second.asked == [TEXTS[4], *TEXTS]
    third = Counting()
    assert make(policy_folder, out, oracle=third).learn() == {}
    assert third.asked == []


def test_a_damaged_chunk_is_named(policy_folder: Path, out: Path) -> None:
    next(make(policy_folder, out).updates())
    damaged = out / "round-1" / "chunk-00000.json"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="chunk-00000"):
        make(policy_folder, out)


def test_what_decides_nothing_may_change(policy_folder: Path, out: Path, tmp_path: Path) -> None:
    """As after running out of memory while sampling: fewer rows at once, and the same result."""
    next(make(policy_folder, out, config=small(sample_batch_size=16)).updates())
    make(policy_folder, out, config=small(sample_batch_size=3, act_temperature=0.0)).learn()
    make(policy_folder, tmp_path / "whole").learn()
    assert files(out) == files(tmp_path / "whole")
    make(policy_folder, out, config=small(sft=replace(small().sft, save_every=1)))


def test_another_run_is_refused_by_what_differs(policy_folder: Path, out: Path) -> None:
    next(make(policy_folder, out).updates())

    def refused(said: str, policy: LanguageModel | Path = policy_folder, **changes: Any) -> None:
        with pytest.raises(CheckpointError, match=rf"was trained with other settings. Changed: {said}\. Set them back"):
            make(policy, out, **changes)

    refused("num_samples: 4 -> 8", config=small(num_samples=8))
    refused("sft.epochs: 2 -> 3", config=small(sft=replace(small().sft, epochs=3)))
    refused("seed: 3 -> 4", seed=4)
    refused(r"instructions_sha256: '\w{64}' -> '\w{64}'", instructions=INSTRUCTIONS[::-1])
    louder = Share(ASCII)
    louder.name = "louder"
    refused("oracle: 'share' -> 'louder'", oracle=louder)
    other = load_policy(policy_folder)
    with torch.no_grad():
        other.model.lm_head.weight[0, 0] += 1e-3
    refused(r"policy_sha256: '\w{64}' -> '\w{64}'", policy=other)
    with pytest.raises(CheckpointError, match=r"holds a run \(round-1\), and resume='never' would overwrite it"):
        make(policy_folder, out, resume="never")
    (out / "config.json").unlink()
    with pytest.raises(CheckpointError, match="Cannot read .*config.json"):
        make(policy_folder, out)
