"""Rollouts by a server: the same tokens, nothing lost in a restart, and a clear error for whatever is not right."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agent_worlds import small_quark
from safetensors.torch import load_file
from servers import VLLM, train_served
from tiny_worlds import (
    ASCII,
    DEMONSTRATIONS,
    INSTRUCTIONS,
    LORA,
    TEMPLATE,
    TEXTS,
    Share,
    assert_near,
    build_llama,
    finish,
    generator,
    load_policy,
    make_env,
    small_ppo,
    start_world,
)

from alpacafarm_env.agents.best_of_n import BestOfN, BestOfNConfig
from alpacafarm_env.agents.evaluation import sequence_kl
from alpacafarm_env.agents.expert_iteration import ExpertIteration
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.ppo import PPO
from alpacafarm_env.agents.quark import Quark
from alpacafarm_env.agents.sft import SFT, SFTConfig
from alpacafarm_env.errors import (
    AlpacaFarmError,
    APIError,
    InvalidReplyError,
    OutageError,
    PermanentAPIError,
    PolicyError,
)
from alpacafarm_env.llm.vllm import body, read_choice

ADAPTER = replace(LORA, init_lora_weights=False)
"""Both of its halves are random: the policy is not its base model."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_INITIAL_S", 0.02)
    for name in ("http_proxy", "https_proxy", "all_proxy", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server(policy_folder: Path) -> Iterator[VLLM]:
    running = VLLM(policy_folder)
    yield running
    running.kill()


def served(server: VLLM, *, width: int = 8, lora=ADAPTER, **settings) -> LanguageModel:
    sampler = {"base_url": server.url, **settings}
    return load_policy(server.folder, lora=lora, max_response_tokens=width, sampler=sampler)


def failure(kind: type[AlpacaFarmError], server: VLLM, **settings) -> str:
    with pytest.raises(kind) as caught:
        served(server, **settings).generate(INSTRUCTIONS, generator=generator())
    return str(caught.value)


# The same tokens -------------------------------------------------------------------------------------------------


def test_greedy_responses_are_those_of_the_process_itself(server: VLLM) -> None:
    policy = served(server, width=12, base_url=f"{server.url}/v1")
    greedy = {"generator": generator(), "temperature": 0.0}
    theirs = policy.generate(INSTRUCTIONS, **greedy)
    policy.sampler = None
    ours = policy.generate(INSTRUCTIONS, **greedy)
    assert theirs.texts == ours.texts
    for name in ("tokens", "lengths", "finished", "prompt_tokens"):
        assert torch.equal(getattr(theirs, name), getattr(ours, name)), name
    torch.testing.assert_close(theirs.logprobs, ours.logprobs, atol=1e-4, rtol=0)
    bare = LanguageModel.from_pretrained(server.folder, max_response_tokens=12).generate(INSTRUCTIONS, **greedy)
    assert bare.texts != ours.texts, "the base model answers alike, so that a lost adapter would not be seen"


def test_draws_are_keyed_row_by_row(server: VLLM) -> None:
    policy = served(server)
    uniforms = torch.rand(6, 8, generator=generator())
    whole = policy.generate(INSTRUCTIONS[:3], generator=uniforms, num_samples=2)
    assert policy.generate(INSTRUCTIONS[:3], generator=uniforms, num_samples=2).texts == whole.texts
    assert policy.generate(INSTRUCTIONS[1:2], generator=uniforms[2:4], num_samples=2).texts == whole.texts[2:4]
    assert whole.texts[0] != whole.texts[1]
    with torch.no_grad():
        torch.testing.assert_close(policy.logprobs(whole), whole.logprobs, atol=1e-4, rtol=0)


def test_a_model_that_is_not_trained_is_asked_by_its_name(server: VLLM) -> None:
    policy = served(server, lora=None, model="base", width=16)
    best = BestOfN(policy, Share(ASCII), config=BestOfNConfig(num_samples=2))
    assert len(best.act(TEXTS)) == len(TEXTS)
    assert not server.loaded
    with pytest.raises(ValueError, match="base"):
        SFT(policy, DEMONSTRATIONS, config=SFTConfig())
    with pytest.raises(ValueError, match="base"):
        ExpertIteration(policy, TEXTS, Share(ASCII))
    assert "'other'" in failure(PermanentAPIError, server, lora=None, model="other")


# Restarts --------------------------------------------------------------------------------------------------------


def killed_while_it_answers(server: VLLM, policy: LanguageModel, uniforms: torch.Tensor) -> None:
    begun = len(server.asked)

    def before(number: int) -> None:
        if number == begun + 2:
            server.kill()
            raise ConnectionResetError

    server.before = before
    with pytest.raises(APIError):
        policy.generate(INSTRUCTIONS, generator=uniforms)
    with pytest.raises(OutageError, match="away"):
        policy.generate(INSTRUCTIONS, generator=uniforms)


def test_after_a_restart_the_adapter_is_loaded_and_draws_are_the_same(server: VLLM) -> None:
    policy, uniforms = served(server, max_concurrency=2), torch.rand(5, 8, generator=generator())
    straight = policy.generate(INSTRUCTIONS, generator=uniforms)
    killed_while_it_answers(server, policy, uniforms)
    server.start()
    assert torch.equal(policy.generate(INSTRUCTIONS, generator=uniforms).tokens, straight.tokens)
    assert server.loaded == [server.loaded[0]] * 2


def test_another_model_after_a_restart_is_noticed(server: VLLM, tmp_path: Path) -> None:
    policy, uniforms = served(server, max_concurrency=1), torch.rand(5, 8, generator=generator())
    policy.generate(INSTRUCTIONS, generator=uniforms)
    killed_while_it_answers(server, policy, uniforms)
    server.folder = other_weights(policy, tmp_path)
    server.start()
    with pytest.raises(PolicyError):
        policy.generate(INSTRUCTIONS, generator=uniforms)


# Refusals --------------------------------------------------------------------------------------------------------


def other_weights(policy: LanguageModel, tmp_path: Path) -> Path:
    other = build_llama(len(policy.tokenizer), seed=1)
    LanguageModel(other, policy.tokenizer, TEMPLATE).save(tmp_path / "other")
    return tmp_path / "other"


def test_a_server_with_other_weights_is_refused_with_the_number(server: VLLM, tmp_path: Path) -> None:
    policy = served(server)
    server.kill()
    server.folder = other_weights(policy, tmp_path)
    server.start()
    with pytest.raises(PolicyError, match="nats"):
        policy.generate(INSTRUCTIONS, generator=generator())
    policy.sampler = {"base_url": server.url, "max_mismatch": 100.0}
    assert len(policy.generate(INSTRUCTIONS, generator=generator())) == len(INSTRUCTIONS)


def test_log_probabilities_that_are_no_numbers_are_refused(server: VLLM) -> None:
    policy = served(server)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.fill_(torch.nan)
    with pytest.raises(PolicyError):
        policy.generate(INSTRUCTIONS, generator=generator())


@pytest.mark.parametrize(("version", "told"), [("0.14.1", "0.14.1"), ("", "version")])
def test_an_old_or_unknown_version_is_refused(server: VLLM, version: str, told: str) -> None:
    server.version = version
    assert told in failure(PermanentAPIError, server)
    assert not server.asked


@pytest.mark.parametrize(
    ("spoiled", "told"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": [5.0] * 8}, "token_ids"),
        ({"prompt_token_ids": None}, "prompt_token_ids"),
        ({"prompt_token_ids": [5]}, "another prompt"),
        ({"logprobs": None}, "no log-probabilities"),
        ({"logprobs": {"token_logprobs": [-1.0] * 7}}, "7 log-probabilities"),
        ({"logprobs": {"token_logprobs": [-1.0] * 7 + [None]}}, "log-probabilities"),
        ({"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}, "1 tokens"),
        ({"token_ids": [5] * 9, "logprobs": {"token_logprobs": [-1.0] * 9}}, "9 tokens"),
        ({"token_ids": [5, 1] * 4}, "'length'"),
        ({"finish_reason": "stop"}, "'stop'"),
        ({"finish_reason": "abort"}, "'abort'"),
    ],
)
def test_a_response_that_is_not_whole_is_an_error(spoiled: dict, told: str) -> None:
    asked = body("m", [3, 4], max_tokens=8, temperature=1.0, stop_token_ids=[1])
    choice = {"token_ids": [5] * 8, "prompt_token_ids": [3, 4], "finish_reason": "length"}
    choice |= {"logprobs": {"token_logprobs": [-1.0] * 8}}
    assert read_choice(json.dumps({"model": "m", "choices": [choice]}), asked).tokens == [5] * 8
    with pytest.raises(InvalidReplyError, match=told):
        read_choice(json.dumps({"model": "m", "choices": [choice | spoiled]}), asked)


def test_a_reply_of_another_version_or_with_more_choices_is_an_error(server: VLLM) -> None:
    server.spoil = lambda reply: reply.update(model="alpacafarm-0")
    assert "alpacafarm-0" in failure(InvalidReplyError, server)
    server.spoil = lambda reply: reply["choices"].append(reply["choices"][0])
    assert "2 responses" in failure(InvalidReplyError, server)


def test_an_adapter_that_the_server_does_not_take_is_an_error(server: VLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_load", lambda **_: VLLM._load(server, "x", "/nowhere"))
    assert "/nowhere" in failure(PermanentAPIError, server)


def test_settings_that_cannot_work_are_refused(server: VLLM) -> None:
    with pytest.raises(ValueError, match="LoRA"):
        served(server, lora=None)
    with pytest.raises(TypeError, match="base_ulr"):
        served(server, base_ulr=1)
    with pytest.raises(ValueError, match="max_mismatch"):
        served(server, max_mismatch=0.0)
    with pytest.raises(ValueError, match="recompute_logprobs"):
        PPO(make_env(16), served(server), config=small_ppo(recompute_logprobs=False))
    policy = served(server, lora=None, model="base")
    with pytest.raises(ValueError, match="control tokens"):
        policy.add_control_tokens(("<good>", "<bad>"), generator())
    sampler, policy.sampler = policy.sampler, None
    policy.add_control_tokens(("<good>", "<bad>"), generator())
    policy.sampler = sampler
    with pytest.raises(ValueError, match="control tokens"):
        policy.generate(INSTRUCTIONS, generator=generator())


# Training --------------------------------------------------------------------------------------------------------


def test_ppo_samples_each_step_from_the_adapter_as_it_is_then(server: VLLM) -> None:
    policy = served(server, width=4, lora=LORA)
    agent = PPO(make_env(16), policy, config=small_ppo(learning_rate=0.05, max_response_tokens=4))
    updates = agent.updates()
    metrics = [next(updates)]
    first = list(server.loaded)
    metrics += updates
    assert len(metrics) == 2
    assert agent._recomputes()
    assert len(first) == 1
    assert len(set(server.loaded)) == 2
    assert Counter(body["model"] for body in server.asked[-32:]) == dict.fromkeys(server.loaded, 16)
    assert list(server.adapters) == server.loaded[1:], "the adapter before it is still there"
    theirs = policy.generate(TEXTS, generator=generator(), temperature=0.0)
    policy.sampler = None
    assert policy.generate(TEXTS, generator=generator(), temperature=0.0).texts == theirs.texts
    assert len(set(server.loaded)) == 3


def test_a_divergence_is_not_of_log_probabilities_at_another_temperature(server: VLLM) -> None:
    policy = served(server, width=4, lora=LORA)
    config = small_quark(total_steps=1, temperature=0.5, max_response_tokens=4)
    metrics = next(Quark(make_env(16), policy, config=config).updates())
    assert metrics["kl/k3"] == pytest.approx(0, abs=1e-6)  # nothing is learned yet
    policy.add_reference()
    rollouts = policy.generate(TEXTS, generator=generator(), temperature=0.5)
    assert sequence_kl(policy, rollouts, 0.5).tolist() == pytest.approx([0] * len(TEXTS), abs=1e-5)


@pytest.mark.slow
def test_two_processes_train_as_one(server: VLLM, tmp_path: Path) -> None:
    finish(start_world(train_served, server.folder, server.url, tmp_path / "two", 8, size=2))
    versions = set(server.loaded)
    assert len(versions) == 2
    train_served(server.folder, server.url, tmp_path / "one", 16)
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert_near(two, one, atol=1e-6)
