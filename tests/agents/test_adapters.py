"""LoRA adapters: what trains, merged ones that sample the same, and saved folders wherever they are read."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import yaml
from tiny_worlds import (
    ASCII,
    DEMONSTRATIONS,
    INSTRUCTIONS,
    LORA,
    TEMPLATE,
    TEXTS,
    Share,
    build_llama,
    generator,
    load_policy,
    make_env,
    small_ppo,
)
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from alpacafarm_env import agents
from alpacafarm_env.__main__ import main
from alpacafarm_env.agents import PolicyActor, RewardModeling, RewardModelingConfig
from alpacafarm_env.agents.adapters import sampling_weights
from alpacafarm_env.agents.expert_iteration import ExpertIterationConfig
from alpacafarm_env.agents.fused import unfuse
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.agents.value_model import ValueModel
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.folders import hash_model
from alpacafarm_env.instructions import Instruction, Preference
from alpacafarm_env.oracles import RewardModel

pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in  -:UserWarning")
KINDS = {
    "all_linear": {"target_modules": "all-linear"},
    "dora": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "with_a_whole_layer": {"target_modules": ["v_proj"], "modules_to_save": ["norm"]},
}


def adapted(tokenizer, kind):
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **KINDS[kind])
    model = peft.get_peft_model(build_llama(len(tokenizer)), config)
    policy = LanguageModel(model, tokenizer, TEMPLATE, max_response_tokens=12)
    move(policy, 3)
    return policy


@torch.no_grad()
def move(policy, seed):
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.15, generator=generator(seed))
        elif parameter.requires_grad:
            parameter.mul_(1.1)


def weights(policy):
    return {name: value.clone() for name, value in policy.model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_sample_the_same_and_leave_the_model_alone(kind, tokenizer):
    policy = adapted(tokenizer, kind)
    expected = policy.generate(INSTRUCTIONS, generator=generator())
    unfuse(policy.model)  # fused layers do not call the modules of their adapters
    before, passes = weights(policy), []
    for name, module in policy.model.named_modules():
        if name.endswith(("lora_A.default", "lora_B.default")):
            module.register_forward_hook(lambda *_, name=name: passes.append(name))
    with sampling_weights(policy.model, merged=True):
        merged = policy.generate(INSTRUCTIONS, generator=generator())
    assert not passes
    assert torch.equal(merged.tokens, expected.tokens)
    torch.testing.assert_close(merged.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    after = weights(policy)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    torch.testing.assert_close(policy.logprobs(merged).detach(), merged.logprobs, atol=1e-5, rtol=0)
    assert passes or kind == "dora"  # DoRA's layers call no modules


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [12, 40])
def test_bfloat16_samples_by_a_copy_and_leaves_the_model_alone(kind, width, tokenizer):
    policy = adapted(tokenizer, kind)
    before, parameters = weights(policy), dict(policy.model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    policy.precision, dtypes = "bfloat16", set()
    handle = policy._base_model.get_output_embeddings().register_forward_hook(lambda *a: dtypes.add(a[2].dtype))
    rollouts = policy.generate(INSTRUCTIONS, generator=generator(), max_new_tokens=width)
    handle.remove()
    assert dtypes == {torch.bfloat16}
    after = dict(policy.model.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert {name for name, parameter in after.items() if parameter.requires_grad} == trained
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())
    with torch.no_grad():
        difference = (policy.logprobs(rollouts) - rollouts.logprobs).abs()
    assert 0 < difference.mean() < 0.05
    assert difference.max() < 0.5


def test_merging_spares_the_table_that_a_layer_is_tied_to(tokenizer):
    model = build_llama(len(tokenizer), tie_word_embeddings=True)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM", init_lora_weights=False)
    with pytest.warns(UserWarning, match="tie"):
        policy = LanguageModel(peft.get_peft_model(model, config), tokenizer, TEMPLATE, max_response_tokens=12)
    expected = policy.generate(INSTRUCTIONS, generator=generator())
    with sampling_weights(policy.model, merged=True):
        assert torch.equal(policy.generate(INSTRUCTIONS, generator=generator()).tokens, expected.tokens)
    assert model.lm_head.base_layer.weight is model.get_input_embeddings().weight


SFT = agents.SFTConfig(batch_size=5, epochs=1, learning_rate=1e-2)
MAKERS: dict[str, Any] = {
    "sft": lambda policy: agents.SFT(policy, DEMONSTRATIONS, config=SFT),
    "expert_iteration": lambda policy: agents.ExpertIteration(
        policy, TEXTS, Share(ASCII), config=ExpertIterationConfig(num_samples=2, sft=SFT)
    ),
    "ppo": lambda policy: agents.PPO(make_env(), policy, config=small_ppo(total_steps=1, learning_rate=1e-2)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_float32_adapters_over_a_bfloat16_base_are_what_trains(name: str, policy_folder: Path, tmp_path: Path) -> None:
    lora = replace(LORA, init_lora_weights=False)  # from the identity, half of it would not move in the first update
    policy = load_policy(policy_folder, lora=lora, dtype=torch.bfloat16, max_response_tokens=16)
    before = {key: value.clone() for key, value in policy.model.state_dict().items()}
    agent = MAKERS[name](policy)
    agent.learn()
    after = policy.model.state_dict()
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert changed == {key for key in after if "lora_" in key}
    assert {value.dtype for key, value in after.items() if "lora_" in key} == {torch.float32}
    assert {value.dtype for key, value in after.items() if "lora_" not in key} == {torch.bfloat16}
    agent.save(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved", dtype=torch.bfloat16, max_response_tokens=16)
    rollouts = policy.as_rollouts(TEXTS, ["fine"] * len(TEXTS))
    torch.testing.assert_close(loaded.logprobs(rollouts), policy.logprobs(rollouts), rtol=0, atol=0)


ACTIVE = replace(LORA, init_lora_weights=False)
ANSWERS = ["fine"] * len(INSTRUCTIONS)
PAIRS = [Preference(Instruction("Hi"), ("Hello", "No"), 1)]


@pytest.fixture
def tree(policy_folder, tmp_path, monkeypatch):
    """A folder of runs with a base in it, and the adapters of a policy and of a reward model made there by a path
    relative to it, as `--policy base` gives.
    """
    tree = tmp_path / "runs"
    shutil.copytree(policy_folder, tree / "base")
    monkeypatch.chdir(tree)
    policy = LanguageModel.from_pretrained("base", lora=ACTIVE)
    PolicyActor(policy).save("out/policy")
    reward = RewardModeling("base", PAIRS, lora=ACTIVE, config=RewardModelingConfig(learning_rate=0.1))
    reward.learn()
    reward.save("out/reward")
    return tree


def read(tree: Path) -> list[np.ndarray]:
    """What its policy, reward model and value model say, read from the folder `tree / "out"`."""
    policy = LanguageModel.from_pretrained(tree / "out" / "policy")
    rollouts = policy.as_rollouts(INSTRUCTIONS, ANSWERS)
    value = ValueModel.from_pretrained(tree / "out" / "reward", policy=policy)
    value.head.weight.data.fill_(1.0)
    with torch.no_grad():
        said = [policy.logprobs(rollouts).numpy(), value.values(rollouts).numpy()]
    return [*said, RewardModel(tree / "out" / "reward").score(INSTRUCTIONS, ANSWERS)]


def test_an_adapter_is_read_from_any_directory_and_after_a_move_of_the_tree(tree, tmp_path, monkeypatch):
    here, content = read(tree), hash_model(tree / "out" / "policy")
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    peft.AutoPeftModelForCausalLM.from_pretrained(tree / "out" / "policy")
    peft.AutoPeftModelForSequenceClassification.from_pretrained(tree / "out" / "reward", num_labels=1)
    moved = tree.rename(tmp_path / "else" / "moved")
    for folder in (moved, Path("moved")):
        for first, second in zip(here, read(folder), strict=True):
            np.testing.assert_array_equal(first, second)
    assert hash_model(moved / "out" / "policy") == content
    again = LanguageModel.from_pretrained("moved/out/policy")
    again.save(tmp_path / "again")  # from where its base is now
    found = LanguageModel.from_pretrained(tmp_path / "again").logprobs(again.as_rollouts(INSTRUCTIONS, ANSWERS))
    np.testing.assert_array_equal(found.detach().numpy(), here[0])
    # The adapter alone goes by the place that it was saved with.
    shutil.move(tmp_path / "again", tmp_path / "a" / "far" / "again")
    LanguageModel.from_pretrained(tmp_path / "a" / "far" / "again")


def test_a_base_that_is_nowhere_is_looked_for_in_two_places(tree, tmp_path, monkeypatch):
    (tree / "base").rename(tree / "other")
    for load in (LanguageModel.from_pretrained, lambda folder: RewardModel(folder).score(["Hi"], ["Yes"]), hash_model):
        with pytest.raises(CheckpointError, match=f"{tree / 'base'}.*base_model_name_or_path.*merge"):
            load(tree / "out" / ("policy" if load is not hash_model else "reward"))
    moved = shutil.move(tree / "out", tmp_path / "out")
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'base'} or {tree / 'base'}"):
        LanguageModel.from_pretrained(Path(moved) / "policy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_it_is_the_same_model_in_plain_transformers(tree, dtype):
    base = AutoModelForCausalLM.from_pretrained(tree / "base").to(dtype)
    base.save_pretrained(tree / "base")
    for name in ("policy", "reward"):
        assert main(["merge", f"out/{name}", f"whole/{name}"]) == 0
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained("out/policy", dtype=torch.float32)
    exact = adapted.merge_and_unload().state_dict()
    plain = AutoModelForCausalLM.from_pretrained("whole/policy")
    assert plain.dtype == dtype
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(value, exact[key].to(dtype), rtol=0, atol=0)
    again = LanguageModel.from_pretrained("whole/policy")
    assert again.encode_prompts(INSTRUCTIONS) == LanguageModel.from_pretrained("out/policy").encode_prompts(
        INSTRUCTIONS
    )
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    scores = [RewardModel(f"{form}/reward").score(INSTRUCTIONS, ANSWERS) for form in ("out", "whole")]
    np.testing.assert_allclose(*scores, rtol=0, atol=tolerance)
    assert np.ptp(scores[0]) > 0.2
    head = AutoModelForSequenceClassification.from_pretrained("whole/reward", dtype=torch.float32).score.weight
    trained = RewardModel("out/reward")._model.get_base_model().score.modules_to_save["default"].weight
    torch.testing.assert_close(head, trained, rtol=0, atol=0)


def test_what_cannot_be_merged_is_refused(tree):
    for folder, out in (("base", "new"), ("out/policy", "base"), ("out/policy", "out/policy/tokenizer.json")):
        assert main(["merge", folder, out]) == 2
    LanguageModel.from_pretrained("base")
    assert not Path("new").exists()


def test_control_tokens_are_merged_too(tree):
    policy = LanguageModel.from_pretrained("base", lora=ACTIVE)
    policy.add_control_tokens(["<good>", "<bad>"], generator())
    policy.save("out/conditioned", merged=True)
    rollouts = policy.as_rollouts(INSTRUCTIONS, ANSWERS)
    again = LanguageModel.from_pretrained("out/conditioned")
    assert again.encode_prompts(["Hi"]) == policy.encode_prompts(["Hi"])
    torch.testing.assert_close(again.logprobs(rollouts), policy.logprobs(rollouts), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Could not find a config file")
def test_a_card_names_a_base_of_the_hub(tree, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    policy = LanguageModel.from_pretrained("base", lora=LORA)
    policy._base_model.name_or_path = policy.model.active_peft_config.base_model_name_or_path = "someone/model"
    policy.save("out/hub")
    assert yaml.safe_load(Path("out/hub/README.md").read_text().split("---\n")[1])["base_model"] == "someone/model"
    assert json.loads(Path("out/hub/adapter_config.json").read_text())["base_model_name_or_path"] == "someone/model"


def test_a_folder_holds_the_form_that_was_saved_last(tree):
    policy = LanguageModel.from_pretrained("out/policy")
    policy.save("out/policy", merged=True)
    policy.save("out/policy")
    assert not list(Path("out/policy").glob("model*"))
    policy.save("out/policy", merged=True)
    with pytest.raises(CheckpointError, match="base"):
        policy.save("base")
    shutil.rmtree("base")
    LanguageModel.from_pretrained("out/policy")


@pytest.mark.parametrize("name", ["policy", "reward"])
@pytest.mark.parametrize("form", ["out", "whole"])
def test_a_model_card_says_how_it_was_made_and_its_code_runs(tree, tmp_path, monkeypatch, capsys, name, form):
    if form == "whole":
        main(["merge", f"out/{name}", f"whole/{name}"])
    monkeypatch.chdir("/")
    text = (tree / form / name / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["library_name"] == ("peft" if form == "out" else "transformers")
    assert head["pipeline_tag"] == ("text-classification" if name == "reward" else "text-generation")
    assert "base_model" not in head  # a folder, which the hub does not know
    assert str(tmp_path) not in text
    assert ("RewardModeling" in text) is (name == "reward" and form == "out")
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    capsys.readouterr()
    for code in codes:
        exec(code.replace("FOLDER", str(tree / form / name)).replace("max_new_tokens=64", "max_new_tokens=4"), {})
    lines = capsys.readouterr().out.splitlines()
    if name == "reward":
        assert float(lines[-1].strip("[]")) == pytest.approx(float(lines[0]), abs=1e-5)
    assert len(codes) == 2
