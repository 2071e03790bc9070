import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_worlds import LORA, TEXTS, TinyDataset

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.reward_modeling import RewardModeling, RewardModelingConfig
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.instructions import Preference
from alpacafarm_env.oracles.reward_model import RewardModel

PREFERENCES = TinyDataset().preferences()
FIT = RewardModelingConfig(epochs=15, batch_size=5, learning_rate=3e-3)


def flipped(preference: Preference) -> Preference:
    return Preference(preference.instruction, preference.responses, 3 - preference.preference)


def equal(preference: Preference) -> Preference:
    return Preference(preference.instruction, ("same", "same"), 1)


def test_it_learns_which_response_is_preferred(policy_folder: Path) -> None:
    agent = RewardModeling(policy_folder, PREFERENCES, config=FIT, validation=PREFERENCES)
    assert agent.evaluate(PREFERENCES)["accuracy"] + agent.evaluate([*map(flipped, PREFERENCES)])["accuracy"] == 1
    metrics = agent.learn()
    assert metrics["eval/accuracy"] == 1
    assert metrics["eval/loss"] < 0.1
    assert agent.evaluate([*map(flipped, PREFERENCES)])["accuracy"] == 0


def test_equal_texts_lose_log_two_with_no_gradient_and_half_the_accuracy(policy_folder: Path) -> None:
    agent = RewardModeling(policy_folder, [*map(equal, PREFERENCES)], config=FIT)
    metrics = next(agent.updates())
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(0, abs=1e-5)
    assert metrics["accuracy"] == 0.5


def test_a_target_of_zero_is_the_flipped_preference(policy_folder: Path) -> None:
    soft = next(RewardModeling(policy_folder, PREFERENCES, targets=[0.0] * 5, config=FIT).updates())
    hard = next(RewardModeling(policy_folder, [*map(flipped, PREFERENCES)], config=FIT).updates())
    assert soft["loss"] == pytest.approx(hard["loss"], abs=1e-6)
    assert soft["grad_norm"] == pytest.approx(hard["grad_norm"], abs=1e-5)


def test_a_target_stays_with_its_preference_where_another_is_left_out(policy_folder: Path) -> None:
    preferences = [PREFERENCES[2], *PREFERENCES[:2]]  # the longest prompt comes first
    config = RewardModelingConfig(batch_size=2, max_length=40)
    with pytest.warns(UserWarning, match="1 of 3"):
        cut = RewardModeling(policy_folder, preferences, targets=[0.5, 1.0, 0.0], config=config)
    assert cut.num_left_out == 1
    whole = RewardModeling(policy_folder, preferences[1:], targets=[1.0, 0.0], config=config)
    assert next(cut.updates()) == next(whole.updates())


def test_weights_of_another_type_are_not_resumed(policy_folder: Path, tmp_path: Path) -> None:
    RewardModeling(policy_folder, PREFERENCES, out=tmp_path / "run").learn()
    with pytest.raises(CheckpointError, match="dtype.*bfloat16"):
        RewardModeling(policy_folder, PREFERENCES, out=tmp_path / "run", dtype=torch.bfloat16)


def test_the_head_starts_as_stiennons_and_depends_on_the_seed_alone(policy_folder: Path) -> None:
    first, again, other = (RewardModeling(policy_folder, PREFERENCES, seed=seed).model.score for seed in (0, 0, 1))
    assert first.bias is None
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    weights = [RewardModeling(policy_folder, PREFERENCES, seed=s).model.score.weight.detach() for s in range(12)]
    stacked = torch.stack(weights)
    assert float(stacked.std()) == pytest.approx(1 / math.sqrt(33), rel=0.15)


@pytest.mark.parametrize("end_with_eos", [True, False])
def test_the_saved_folder_scores_the_same_as_an_oracle(policy_folder: Path, tmp_path: Path, end_with_eos: bool) -> None:
    config = RewardModelingConfig(epochs=2, learning_rate=1e-3, end_with_eos=end_with_eos)
    agent = RewardModeling(policy_folder, PREFERENCES, config=config, device="cpu")
    agent.learn()
    responses = ["yes", "", "a longer response </s> with a spelled-out token", "é🙂", "no"]
    raw = agent.score(TEXTS, responses)
    mean, std = agent.calibrate(TEXTS, responses)
    agent.save(tmp_path / "reward")
    oracle = RewardModel(tmp_path / "reward", device="cpu")
    np.testing.assert_allclose(oracle.score(TEXTS, responses), (raw - mean) / std, atol=1e-4)
    saved = json.loads((tmp_path / "reward" / "config.json").read_text())
    assert saved["alpacafarm_end_with_eos"] is end_with_eos
    assert saved["architectures"] == ["LlamaForSequenceClassification"]
    assert len(saved["id2label"]) == 1
    assert (tmp_path / "reward" / "prompt_template.json").is_file()


def test_scores_do_not_depend_on_the_batch(policy_folder: Path) -> None:
    agent = RewardModeling(policy_folder, PREFERENCES)
    alone = [float(agent.score([text], [text])[0]) for text in TEXTS]
    np.testing.assert_allclose(agent.score(TEXTS, TEXTS), alone, atol=1e-5)
    assert agent.score([], []).shape == (0,)


def test_a_unit_of_reward_can_be_the_spread_within_an_instruction(policy_folder: Path) -> None:
    agent = RewardModeling(policy_folder, PREFERENCES, device="cpu")
    asked = [text for text in TEXTS for _ in range(3)]
    responses = [f"{text} {number}" for text in TEXTS for number in range(3)]
    mean, std = agent.calibrate(asked, responses, num_samples=3)
    groups = agent.score(asked, responses).reshape(-1, 3)
    assert std == pytest.approx(math.sqrt(np.mean([np.var(group, ddof=1) for group in groups])))
    assert std < agent.calibrate(asked, responses)[1]  # instructions differ in their means too
    assert mean == pytest.approx(groups.mean())
    for texts, num_samples, told in (
        ((asked, responses), 2, "reshape"),
        (([TEXTS[0]] * 2 + [TEXTS[1]] * 2, ["x", "x", "y", "y"]), 2, "got 4 with std 0"),
        ((TEXTS[:1], ["x"]), 1, "got 1 with std 0"),
    ):
        with pytest.raises(ValueError, match=told):
            agent.calibrate(*texts, num_samples=num_samples)


def test_texts_that_are_too_long_are_counted(policy_folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"1 of 5 .* 48 tokens") as warned:
        agent = RewardModeling(policy_folder, PREFERENCES, config=RewardModelingConfig(max_length=48))
    assert len(warned) == 2  # the chosen responses, and the rejected
    assert max(len(text) for pair in agent._pairs for text in pair) == 48


@pytest.mark.parametrize(("max_length", "limit"), [(40, 40), (512, 256)])  # the model has 256 positions
def test_the_longest_text_of_training_is_the_longest_that_the_oracle_reads(
    policy_folder: Path, tmp_path: Path, max_length: int, limit: int
) -> None:
    """The model learned from texts without their middle, so it must be shown no others."""
    config = RewardModelingConfig(max_length=max_length)
    agent = RewardModeling(policy_folder, PREFERENCES[:1], config=config, device="cpu")
    agent.save(tmp_path / "saved")
    texts = TEXTS[:2], ["word " * 80, "a" * 260]
    with pytest.warns(UserWarning, match=f"2 of 2 .* {limit} tokens"):
        expected = agent.score(*texts)
    np.testing.assert_allclose(RewardModel(tmp_path / "saved").score(*texts), expected, rtol=0, atol=1e-5)
    if max_length < 256:
        assert np.abs(RewardModel(tmp_path / "saved", max_length=100).score(*texts) - expected).max() > 1e-3


def test_bad_input_is_refused(policy_folder: Path) -> None:
    with pytest.raises(ValueError, match="got none"):
        RewardModeling(policy_folder, [])
    with pytest.raises(ValueError, match="5 preferences, got 1"):
        RewardModeling(policy_folder, PREFERENCES, targets=[1.0])


# With LoRA ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_and_its_head_learn_over_a_frozen_base(policy_folder: Path, tmp_path: Path, dtype) -> None:
    config = replace(FIT, learning_rate=1e-2)
    agent = RewardModeling(policy_folder, PREFERENCES, config=config, lora=LORA, dtype=dtype, device="cpu")
    before = {name: p.detach().clone() for name, p in agent.model.named_parameters()}
    trained = {name: p for name, p in agent.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for name, p in before.items() if "layers" in name and name not in trained} == {dtype}
    assert agent.learn()["accuracy"] == 1
    changed = {name for name, p in agent.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in trained if "lora_" in name or "score" in name} == trained.keys()
    mean, std = agent.calibrate(TEXTS, TEXTS)
    agent.save(tmp_path / "reward")
    assert not (tmp_path / "reward" / "model.safetensors").exists()
    for oracle in (
        RewardModel(tmp_path / "reward", device="cpu", dtype=str(dtype).removeprefix("torch.")),
        LanguageModel.from_pretrained(policy_folder, lora=LORA, dtype=dtype).reward_oracle(tmp_path / "reward"),
    ):
        expected = (agent.score(TEXTS, TEXTS) - mean) / std
        np.testing.assert_allclose(oracle.score(TEXTS, TEXTS), expected, rtol=0, atol=1e-5)


def test_peft_alone_reads_what_is_saved(policy_folder: Path, tmp_path: Path) -> None:
    agent = RewardModeling(policy_folder, PREFERENCES, config=FIT, lora=LORA, device="cpu")
    agent.learn()
    agent.save(tmp_path)
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    for instruction, response, expected in zip(TEXTS, TEXTS, agent.score(TEXTS, TEXTS), strict=True):
        (ids,) = agent._encode([instruction], [response])
        assert model(input_ids=torch.tensor([ids])).logits.item() == pytest.approx(expected, abs=1e-5)


def test_it_starts_from_an_adapter_and_its_base_as_from_a_whole_model(policy_folder: Path, tmp_path: Path) -> None:
    tuned = LanguageModel.from_pretrained(policy_folder, lora=replace(LORA, init_lora_weights=False))
    tuned.save(tmp_path / "adapter")
    tuned.save(tmp_path / "whole", merged=True)
    first, second = (next(RewardModeling(tmp_path / name, PREFERENCES).updates()) for name in ("adapter", "whole"))
    assert first == second != next(RewardModeling(policy_folder, PREFERENCES).updates())
    with pytest.raises(CheckpointError, match=r"adapter.*alpacafarm merge"):
        RewardModeling(tmp_path / "adapter", PREFERENCES, lora=LORA)


def test_only_an_adapter_over_the_policys_own_base_is_read_on_its_trunk(
    policy_folder: Path, reward_model_folder: Path, tmp_path: Path
) -> None:
    RewardModeling(policy_folder, PREFERENCES, lora=LORA).save(tmp_path / "reward")
    other = shutil.copytree(policy_folder, tmp_path / "copy")
    policy = LanguageModel.from_pretrained(other, lora=LORA)
    assert policy.reward_oracle(tmp_path / "reward")  # the same weights by another path
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    for refused in (LanguageModel.from_pretrained(other, lora=LORA), LanguageModel.from_pretrained(policy_folder)):
        with pytest.raises(ValueError, match="LoRA reward adapter over the base"):
            refused.reward_oracle(tmp_path / "reward")
    with pytest.raises(ValueError, match="LoRA reward adapter over the base"):
        policy.reward_oracle(reward_model_folder)
    with pytest.raises(ValueError, match="LoRA reward adapter over the base"):
        policy.reward_oracle(tmp_path / "none")
