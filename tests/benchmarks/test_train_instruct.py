"""Instruct models as a hub has them: trained, answered for and judged by commands alone, without an edit."""

import json
import shutil

import pytest
from chat_tokenizers import FAMILIES
from hub_models import build_hub_folder
from written import rows_of

from alpacafarm_env.__main__ import main
from alpacafarm_env.agents import LanguageModel
from alpacafarm_env.annotators import JudgeServer
from alpacafarm_env.benchmarks import train
from alpacafarm_env.chat_templates import ChatTemplate


@pytest.fixture
def data(own_data, tmp_path):
    """A user's data with demonstrations and preferences."""
    folder = shutil.copytree(own_data, tmp_path / "data")
    answers = {"output_1": "No.", "output_2": "Yes, now.", "preference": 2}
    rows = {
        "sft": [{"instruction": f"Do {i}.", "input": "", "output": f"Done {i}."} for i in range(8)],
        "preference": [{"instruction": f"Try {i}.", "input": "", **answers} for i in range(8)],
    }
    for split, found in rows.items():
        (folder / f"{split}.json").write_text(json.dumps(found))
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The tokenizer has:UserWarning")
@pytest.mark.parametrize("lora", [[], ["--lora", "4"]], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_from_an_instruct_folder_to_judged_answers_by_commands(family, lora, data, tmp_path, monkeypatch):
    def command(method, policy, *more):
        small = ["--quick", "--preset", "sandbox", "--num-eval", 5]
        given = ["--dataset", data, "--policy", policy, "--out", tmp_path / method, *small, *more]
        assert train.run(train.parse([method, *map(str, given)])) == 0
        return tmp_path / method

    hub = build_hub_folder(family, tmp_path / "hub")
    (tuned,) = command("sft", hub, "--batch-size", 4).glob("runs/*/policy")
    sizes = ["--rollout-batch-size", 4, "--minibatch-size", 4, "--steps", 1]
    reward = command("reward_modeling", tuned, "--batch-size", 4, *lora) / "reward_model"
    out = command("ppo", tuned, "--reward-model", reward, *sizes, *lora)
    command("dpo", hub, "--batch-size", 4, *lora)
    (trained,) = out.glob("runs/*/policy")
    policy = LanguageModel.from_pretrained(trained)
    assert isinstance(policy.template, ChatTemplate)
    assert policy.encode_prompts(["Hi"]) == LanguageModel.from_pretrained(hub).encode_prompts(["Hi"])
    monkeypatch.setenv("ALPACAFARM_LEDGER", str(tmp_path / "own.sqlite"))
    with JudgeServer(anyway=True) as server:
        asked = ["--reference", out / "references.json", "--base-url", server.base_url, "--models", "sandbox"]
        assert main(["judge", "evaluate", str(out / "outputs.json"), *map(str, asked)]) == 0
    (row,) = rows_of(out)
    assert row["method"] == "ppo"
