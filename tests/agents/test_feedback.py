"""SFT, DPO and reward modeling: what they learn, from which tokens, and what is saved."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_worlds import DEMONSTRATIONS, LORA, TEXTS, load_policy
from torch import Tensor

from alpacafarm_env.agents.dpo import DPO, DPOConfig
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.reward_modeling import RewardModeling, RewardModelingConfig
from alpacafarm_env.agents.rollouts import segment_sum
from alpacafarm_env.agents.sft import SFT, BinaryFeedME, BinaryFeedMEConfig, SFTConfig
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.instructions import Instruction, Preference
from alpacafarm_env.oracles.reward_model import RewardModel

OVERFIT = SFTConfig(epochs=60, batch_size=4, learning_rate=1e-2, act_temperature=0)


def test_it_overfits_four_examples_on_both_architectures(language_model: LanguageModel) -> None:
    sft = SFT(language_model, DEMONSTRATIONS[:4], config=OVERFIT)
    metrics = sft.learn()
    assert metrics["step"] == 60
    assert metrics["loss"] < 0.02
    assert sft.act([d.instruction for d in DEMONSTRATIONS[:4]]) == tuple(d.response for d in DEMONSTRATIONS[:4])


def test_only_response_tokens_and_eos_are_learned(llama: LanguageModel) -> None:
    """The loss is the cross-entropy of exactly the tokens after the prompt, computed here by a plain forward pass."""
    sft = SFT(llama, DEMONSTRATIONS[:1])
    prompt = llama.encode_prompts([DEMONSTRATIONS[0].instruction])[0]
    response = [*llama.encode_responses([DEMONSTRATIONS[0].response], eos=False)[0], llama.tokenizer.eos_token_id]
    with torch.no_grad():
        logits = llama.model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(response))
    assert sft._data.tokens.tolist() == response
    assert sft.evaluate(DEMONSTRATIONS[:1]) == pytest.approx(float(expected), abs=1e-5)


def test_the_mean_is_over_tokens_not_over_examples(llama: LanguageModel) -> None:
    sft = SFT(llama, DEMONSTRATIONS)
    lengths = sft._data.lengths.tolist()
    each = [sft.evaluate([demonstration]) for demonstration in DEMONSTRATIONS]
    weighted = sum(loss * length for loss, length in zip(each, lengths, strict=True)) / sum(lengths)
    assert len(set(lengths)) > 1
    assert sft.evaluate(DEMONSTRATIONS) == pytest.approx(weighted, abs=1e-5)


def test_steps_are_epochs_of_batches_and_the_last_may_be_small(llama: LanguageModel) -> None:
    updates = list(SFT(llama, DEMONSTRATIONS, config=SFTConfig(epochs=2, batch_size=2)).updates())
    assert [metrics["step"] for metrics in updates] == [1, 2, 3, 4, 5, 6]


def test_responses_that_are_too_long_are_counted(policy_folder: Path) -> None:
    policy = load_policy(policy_folder, max_response_tokens=9)  # "answer 0" and EOS
    with pytest.warns(UserWarning, match="4 of 5 .*max_response_tokens=9") as warned:
        SFT(policy, DEMONSTRATIONS)
    assert warned[0].filename == __file__  # where the user made it


def test_binary_feedme_is_sft_on_the_chosen_responses(llama: LanguageModel, policy_folder: Path) -> None:
    preferences = [
        Preference(d.instruction, (d.response, "no!")[:: 1 if i % 2 else -1], 1 + (i + 1) % 2)
        for i, d in enumerate(DEMONSTRATIONS)
    ]
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 2, "learning_rate": 1e-3}
    feedme = BinaryFeedME(llama, preferences, config=BinaryFeedMEConfig(**settings), seed=4)
    sft = SFT(load_policy(policy_folder, max_response_tokens=16), DEMONSTRATIONS, config=SFTConfig(**settings), seed=4)
    assert list(feedme.updates()) == list(sft.updates())
    for ours, theirs in zip(feedme.policy.model.parameters(), sft.policy.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


PREFERENCES = tuple(
    Preference(Instruction(text, id=i, split="preference"), (f"yes {i}" + "!" * i, "no" * (5 - i)), 1 + i % 2)
    for i, text in enumerate(TEXTS)
)
LN2 = math.log(2)
SMALL = DPOConfig(epochs=2, batch_size=2, learning_rate=1e-3, save_every=2)


def gradients(agent: DPO, total: Tensor) -> dict[str, Tensor]:
    agent.policy.model.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in agent._loop.parameters.items() if p.grad is not None}


def test_the_first_gradient_is_half_beta_times_the_difference_of_gradients(language_model: LanguageModel) -> None:
    """−(β/2) (∇ log π(chosen) − ∇ log π(rejected)), each response read alone, without a pad or a neighbour."""
    agent = DPO(language_model, PREFERENCES, config=DPOConfig(beta=0.3))
    actual = gradients(agent, agent._sums(torch.arange(5), torch.arange(5))["loss"])
    total = torch.zeros(())
    for preference in PREFERENCES:
        for response, sign in ((preference.chosen, 1), (preference.rejected, -1)):
            prompt = language_model.encode_prompts([preference.instruction])[0]
            tokens = language_model.encode_responses([response])[0]
            logits = language_model.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            total = total + sign * logits.log_softmax(-1)[range(len(tokens)), tokens].sum()
    expected = gradients(agent, -0.3 / 2 * total)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=2e-5, rtol=1e-4)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 0.1


def test_the_reference_is_the_policy_before_training(llama: LanguageModel) -> None:
    agent = DPO(llama, PREFERENCES, config=replace(SMALL, micro_batch_tokens=128))
    data = agent._data
    assert data.texts == tuple(p.chosen for p in PREFERENCES) + tuple(p.rejected for p in PREFERENCES)
    assert bool((data.tokens[data.lengths.cumsum(0) - 1] == llama.tokenizer.eos_token_id).all())
    with torch.no_grad():
        before = segment_sum(llama.logprobs(data), data.lengths)
    kept = agent._ref_logprobs.flatten()
    torch.testing.assert_close(kept, before, atol=1e-4, rtol=0)
    agent.learn()
    assert torch.equal(agent._ref_logprobs.flatten(), kept)
    assert not kept.requires_grad
    assert llama.reference is None  # no second model in memory


def test_training_raises_the_chosen_over_the_rejected(language_model: LanguageModel) -> None:
    """The sign: AlpacaFarm's first release had it the wrong way round. Labels are of both kinds, see PREFERENCES."""
    agent = DPO(language_model, PREFERENCES, config=DPOConfig(epochs=6, batch_size=5, learning_rate=1e-3))
    first, *_, last = agent.updates()
    assert [first["loss"], first["margin"]] == [pytest.approx(LN2, abs=1e-5), pytest.approx(0, abs=1e-5)]
    assert last["loss"] < first["loss"] - 0.1
    assert last["accuracy"] == 1
    assert last["margin"] == pytest.approx(last["reward/chosen"] - last["reward/rejected"], abs=1e-5)
    gap = (last["logprob/chosen"] - last["logprob/rejected"]) - (first["logprob/chosen"] - first["logprob/rejected"])
    assert gap == pytest.approx(last["margin"] / agent.config.beta, abs=1e-3)
    assert gap > 2


def test_a_bandit_reaches_its_closed_form(policy_folder: Path) -> None:
    """One token, one state, preferences in the exact proportions of Bradley-Terry: π ∝ π_ref · exp(r / β).

    Five answers are compared, i beating j in odds_i of odds_i + odds_j pairs. Preferences fix the ratios among the five
    and nothing else, so it is their shares of one another that must come within 0.01 of the optimum's, and the rewards
    recovered, up to a constant, within 0.05 of the true ones.
    """
    policy = load_policy(policy_folder, max_response_tokens=1)
    letters, odds = "abcde", (1, 2, 3, 4, 6)  # odds = exp(r)
    instruction = Instruction(TEXTS[0], id=0, split="preference")
    preferences = [
        Preference(instruction, (letters[i], letters[j]), winner)
        for i in range(5)
        for j in range(i)
        for winner, share in ((1, odds[i]), (2, odds[j]))
        for _ in range(share)
    ]
    tokens = [policy.encode_responses([letter], eos=False)[0][0] for letter in letters]
    prompt = torch.tensor(policy.encode_prompts([instruction]))

    def shares() -> Tensor:
        with torch.no_grad():
            return policy.model(input_ids=prompt).logits[0, -1, tokens].softmax(-1)

    size = len(preferences)
    config = DPOConfig(beta=0.5, epochs=30, batch_size=size, learning_rate=5e-3, schedule="cosine", max_grad_norm=None)
    reference, rewards = shares(), torch.tensor(odds).log()
    optimum = (reference.log() + rewards / config.beta).softmax(-1)
    assert float((reference - optimum).abs().max()) > 0.1
    with pytest.warns(UserWarning, match="max_response_tokens=1"):  # the one token is the letter
        agent = DPO(policy, preferences, config=config)
    agent.learn()
    torch.testing.assert_close(shares(), optimum, atol=0.01, rtol=0)
    recovered = config.beta * (shares().log() - reference.log())
    torch.testing.assert_close(recovered - recovered.mean(), rewards - rewards.mean(), atol=0.05, rtol=0)


def test_smoothed_labels_keep_the_margin_finite(llama: LanguageModel) -> None:
    """Where every label is held to be wrong with probability ε, the best margin is log((1 − ε) / ε)."""
    config = DPOConfig(epochs=120, batch_size=1, learning_rate=2e-3, label_smoothing=0.25, schedule="cosine", beta=1.0)
    metrics = DPO(llama, PREFERENCES[:1], config=config).learn()
    assert metrics["margin"] == pytest.approx(math.log(3), abs=0.05)


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
