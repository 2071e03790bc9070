"""Training weights of low precision: updates too small for them are kept until they show."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_models import TEMPLATE, build_llama
from tiny_worlds import DEMONSTRATIONS

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.sft import SFT, SFTConfig

STEPS = 60


def train(tokenizer, dtype, out=None, *, stop=STEPS, **settings):
    model = build_llama(len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)  # to the sizes of real models' weights, 0.02
    policy = LanguageModel(model.to(torch.bfloat16).to(dtype), tokenizer, TEMPLATE)
    start = weights(policy)
    config = SFTConfig(
        learning_rate=3e-6, schedule="constant", epochs=STEPS, batch_size=len(DEMONSTRATIONS), **settings
    )
    agent = SFT(policy, DEMONSTRATIONS, config=config, out=out)
    assert agent.num_steps == STEPS
    for metrics in agent.updates():
        if metrics["step"] == stop:
            break
    return agent, weights(policy) - start


def weights(policy):
    return torch.cat([parameter.detach().float().flatten() for parameter in policy.model.parameters()])


def test_many_small_updates_in_bfloat16_move_the_weights_as_in_float32(tokenizer):
    (_, exact), (agent, moved) = (train(tokenizer, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert {parameter.dtype for parameter in agent.policy.model.parameters()} == {torch.bfloat16}
    masters = torch.cat([master.detach().flatten() for master in agent._loop.parameters.values()])
    far = masters - (weights(agent.policy) - moved)  # from the same start, before rounding
    assert torch.corrcoef(torch.stack([far, exact]))[0, 1] > 0.95
    along = (moved @ exact) / (exact @ exact)  # of the weights themselves, each rounded to its nearest neighbour
    assert 0.9 < along < 1.1


def test_moments_and_masters_are_float32_and_of_float32_weights_there_are_none(tokenizer, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        agent, _ = train(tokenizer, dtype, tmp_path / str(dtype), stop=2, save_every=2)
        folder = tmp_path / str(dtype) / "checkpoint-2"
        assert {value.dtype for value in load_file(folder / "optimizer.safetensors").values()} == {torch.float32}
        assert (folder / "masters.safetensors").exists() == (dtype == torch.bfloat16)
        if dtype == torch.float32:
            assert all(
                p is agent._loop.parameters[f"policy.{name}"] for name, p in agent.policy.model.named_parameters()
            )


def test_a_resumed_run_in_bfloat16_is_the_uninterrupted_one(tokenizer, tmp_path: Path):
    whole, _ = train(tokenizer, torch.bfloat16, tmp_path / "whole", stop=9, save_every=3)
    train(tokenizer, torch.bfloat16, tmp_path / "cut", stop=4, save_every=3)
    again, _ = train(tokenizer, torch.bfloat16, tmp_path / "cut", stop=9, save_every=3)
    for name, master in whole._loop.parameters.items():
        assert torch.equal(again._loop.parameters[name], master), name
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert lines[0] == lines[1]
    assert json.loads(lines[0].splitlines()[-1])["step"] == 9


def test_weights_that_are_read_in_between_are_trained_on(tokenizer, tmp_path: Path):
    agent, _ = train(tokenizer, torch.bfloat16, stop=1)
    other = LanguageModel(build_llama(len(tokenizer), seed=1).to(torch.bfloat16), tokenizer, TEMPLATE)
    other.save(tmp_path)
    agent.load(tmp_path)
    next(agent.updates())
    torch.testing.assert_close(weights(agent.policy), weights(other), atol=1e-3, rtol=1e-2)


def test_gradients_are_added_up_in_float32(tokenizer):
    agent, _ = train(tokenizer, torch.bfloat16, stop=1)
    data = agent._data[torch.arange(4)]
    agent._loop.accumulate(list(torch.arange(4).split(1)), lambda part: agent._sums(data[part]), count=len(data.tokens))
    assert all(p.grad is None for p in agent.policy.model.parameters())
    assert {master.grad.dtype for master in agent._loop.parameters.values()} == {torch.float32}
