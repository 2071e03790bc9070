"""Sample responses before and after, with a fake gold oracle that has parts."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from alpacafarm_env.benchmarks.win_rate_curve import samples as win_rate_samples
from alpacafarm_env.benchmarks.win_rate_curve.plan import RunPlan
from alpacafarm_env.errors import DataError
from alpacafarm_env.oracles.base import Verdicts


@dataclass(frozen=True)
class FakeGold:
    name: str = "gold"

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores

    def judge(self, instructions, responses):
        false = np.array([response.count("!") for response in responses])
        words = np.array(["x"] * len(responses))
        return Verdicts(1.0 - false, {"false": false, "word": words})


@pytest.fixture
def plan(tmp_path, tiny_dataset, monkeypatch):
    monkeypatch.setattr(RunPlan, "dataset", tiny_dataset)
    plan = RunPlan(out=tmp_path, steps=4, evaluate_every=4, num_val=1, num_eval=12, seed=3)
    instructions = list(map(str, tiny_dataset.instructions("eval")))
    for step in (0, 4):
        found = {
            "instructions": instructions,
            "responses": [f"at {step}" + "!" * step] * 12,
            "proxy": [step / 8] * 12,
            "gold": [1.0 - step] * 12,
            "win_rate_simulated": [0.25] * 12,
            "win_rate_human": [None] * 12,
            "finished": [1.0] * 11 + [0.0],
        }
        content = {
            "rows": [],
            "eval": found,
            "unscored": {"val": {"proxy": 0, "win_rate_human": 0}, "eval": {"proxy": 0, "win_rate_human": 12}},
        }
        plan.evaluation_file(step).parent.mkdir(parents=True, exist_ok=True)
        plan.evaluation_file(step).write_text(json.dumps(content), encoding="utf-8")
    return plan


def test_same_instructions_with_scores_parts_and_reference(plan, tiny_dataset, monkeypatch):
    monkeypatch.setattr(win_rate_samples, "make_oracle", lambda name, dataset: FakeGold())
    tiny_dataset.level = "sandbox"
    table = win_rate_samples.samples_table(plan, 4)
    assert table.header == ("instruction", "SFT (step 0)", "PPO (step 4)", "reference")
    assert [row[0] for row in table.rows] == [str(tiny_dataset.instructions("eval")[i]) for i in (0, 2, 4, 6, 8, 10)]
    assert table.rows[0][1] == "at 0\n\ngold 1.00; proxy 0.00; win by p_sim^eval 0.25\n\nfalse 0"
    assert table.rows[0][2] == "at 4!!!!\n\ngold -3.00; proxy 0.50; win by p_sim^eval 0.25\n\nfalse 4"
    assert table.rows[1][3] == "Reference for 102."


def test_without_gold_and_references_there_is_less_to_show(plan, tiny_dataset, monkeypatch):
    def none(split):
        raise DataError("none")

    monkeypatch.setattr(tiny_dataset, "references", none)
    table = win_rate_samples.samples_table(plan, 4)
    assert table.header == ("instruction", "SFT (step 0)", "PPO (step 4)")
    assert table.rows[0][1].endswith("p_sim^eval 0.25")


def test_a_response_cut_at_the_limit_says_so(plan, tiny_dataset):
    found = win_rate_samples.read_evaluation(plan, 0)["eval"]
    texts = win_rate_samples.describe_responses(tiny_dataset, found, [0, 11])
    assert [text.split("\n")[0] for text in texts] == ["at 0", "at 0 [cut at the length limit]"]


def test_responses_without_a_verdict_are_counted_where_there_is_a_judge(plan):
    assert win_rate_samples.unscored([plan], "sandbox") == {"win_rate_human": 24}
    assert win_rate_samples.unscored([plan], "live") == {}
