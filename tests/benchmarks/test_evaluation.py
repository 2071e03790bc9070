"""Evaluation of responses by judges whose answers are known, and by judges of one's own."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from written import rows_of

from alpacafarm_env.annotators import JudgeServer
from alpacafarm_env.benchmarks.experiment.evaluation import SCORES, evaluate, judges_of, missing_at, subset
from alpacafarm_env.benchmarks.experiment.own_judge import judge_content, judge_settings, make_own_judge
from alpacafarm_env.benchmarks.win_rate_curve.__main__ import run
from alpacafarm_env.data import load_dataset
from alpacafarm_env.errors import AlpacaFarmError, CheckpointError, DataError
from alpacafarm_env.folders import hash_model
from alpacafarm_env.oracles import RewardModel
from alpacafarm_env.oracles.base import Constant, OracleError
from alpacafarm_env.sandbox import POLICY


class Fixed:
    def __init__(self, *values):
        self.name, self.values, self.calls = "fixed", values, 0

    def score(self, instructions, responses):
        self.calls += 1
        return np.array(self.values, dtype=np.float64)


RESPONSES = ("a", "äö", "🙂🙂🙂")


def test_values_and_means():
    values = (1.0, 2.0, 6.0), (-1.0, 0.0, 1.0), (1.0, 0.5, 0.0), (1.0, 1.0, 0.25)
    judges = {name: Fixed(*each) for name, each in zip(SCORES, values, strict=True)}
    result = evaluate(("i", "j", "k"), RESPONSES, judges, {"finished": [True, True, False]})
    assert result.means() == {
        "proxy": 3.0,
        "gold": 0.0,
        "win_rate_simulated": 50.0,
        "win_rate_human": 75.0,
        "length": 2.0,
        "finished": pytest.approx(2 / 3),
    }
    assert result.values["length"].tolist() == [1, 2, 3]  # code points, not bytes
    assert result.values["proxy"].tolist() == [1, 2, 6]
    assert [oracle.calls for _, oracle in judges.items()] == [1, 1, 1, 1]


def test_a_missing_verdict_is_counted_and_left_out_of_the_mean():
    result = evaluate(("i", "j", "k"), RESPONSES, {"win_rate_human": Fixed(1.0, math.nan, 0.0)})
    assert result.means()["win_rate_human"] == 50.0
    assert result.per_response()["win_rate_human"] == [1.0, None, 0.0]


def test_a_judge_that_does_not_exist_gives_nan_never_a_number():
    means = evaluate(("i",), ("r",), dict.fromkeys(SCORES)).means()
    assert all(math.isnan(means[name]) for name in (*SCORES, "finished"))
    assert means["length"] == 1.0
    nothing = evaluate((), (), {"proxy": Fixed()}, {"finished": []})
    assert all(math.isnan(value) for value in nothing.means().values())


def test_wrong_lengths_and_wrong_answers_are_told():
    with pytest.raises(ValueError, match=r"\(2, 1, 1\)"):
        evaluate(("i", "j"), ("r",), {})
    with pytest.raises(ValueError, match=r"\(1, 1, 2\)"):
        evaluate(("i",), ("r",), {}, {"finished": [True, False]})
    with pytest.raises(OracleError):
        evaluate(("i",), ("r",), {"gold": Fixed(1.0, 2.0)})


def test_outside_the_sandbox_there_is_a_proxy_only(tiny_dataset):
    judges = judges_of(tiny_dataset, proxy=Constant(2.0))
    assert [name for name, oracle in judges.items() if oracle is None] == list(missing_at("recorded"))
    assert missing_at("sandbox") == ()
    assert evaluate(("i",), ("r",), judges).means()["proxy"] == 2.0


def test_subset_of_the_eval_sources_has_each_of_them_in_proportion():
    sources = [252, 188, 129, 80, 156]
    bounds = np.cumsum(sources)
    chosen = np.searchsorted(bounds, subset(805, 200), side="right")
    assert np.abs(np.bincount(chosen) - np.array(sources) * 200 / 805).max() <= 1
    assert (subset(10, 5), subset(3, 9), subset(7, 3)) == ([0, 2, 4, 6, 8], [0, 1, 2], [0, 2, 4])


@pytest.fixture
def held_out(own_models, tmp_path):
    """Another reward model: the tests' one with its head turned round."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "held_out"
    shutil.copytree(own_models[1], folder)
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = -weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_reward_model_held_out_gives_the_share_above_the_reference(options, own_data, held_out, capsys):
    options = replace(options, judge=json.dumps({"reward_model": str(held_out)}))
    assert run(options) == 0
    out = options.out
    table = rows_of(out)
    assert list(table[0])[-1] == "win_rate"
    stored = json.loads((out / "runs" / "seed-0" / "evaluations" / "step-00001.json").read_text())["splits"]["eval"]
    data, oracle = load_dataset(own_data), RewardModel(held_out)
    base = dict(zip(data.instructions("eval"), data.references("eval"), strict=True))
    queried = [next(each for each in base if each == text) for text in stored["instructions"]]  # with their input apart
    ours, theirs = oracle.score(queried, stored["responses"]), oracle.score(queried, [base[each] for each in queried])
    credits = np.where(ours > theirs, 1.0, np.where(ours == theirs, 0.5, 0.0))
    assert stored["win_rate"] == credits.tolist()
    assert float(table[-1]["win_rate"]) == pytest.approx(100 * credits.mean())

    facts = json.loads((out / "manifest.json").read_text())["facts"]
    printed = capsys.readouterr().out
    for text in (facts["judges"], (out / "report.html").read_text(), printed):
        assert "held_out" in text
        assert "references of" in text
    assert (out / "win_rates.png").is_file()
    with pytest.raises(CheckpointError, match="judge"):
        run(replace(options, judge=None))


def test_a_pool_behind_a_server_is_a_judge_and_its_budget_may_change(options, tmp_path):
    with JudgeServer(anyway=True) as server:
        spec = {"pool": "eval", "models": "sandbox", "base_url": server.base_url, "ledger": str(tmp_path / "l.sqlite")}
        options = replace(options, judge=json.dumps(spec))
        assert run(options) == 0
        asked = server.stats()["requests"]
        assert asked > 0
        assert all(0 <= float(row["win_rate"]) <= 100 for row in rows_of(options.out))
        assert run(replace(options, judge=json.dumps({**spec, "budget_usd": 9}))) == 0
        assert server.stats()["requests"] == asked


@pytest.mark.parametrize("judge", ["gold", "humann", "{no json", '{"pool": "nope"}', '{"reward_model": "nowhere"}'])
def test_what_can_be_no_judge_here_is_one_sentence_at_the_start(options, judge):
    with pytest.raises(DataError, match="--judge"):
        run(replace(options, judge=judge))
    assert not (options.out / "runs").exists()


def test_the_reward_model_trained_on_is_not_held_out(options):
    trained_on = {"reward_model": options.reward_model}
    for judge in (trained_on, {"ensemble": ["constant", trained_on]}):
        with pytest.raises(DataError, match="held out"):
            run(replace(options, judge=json.dumps(judge)))
    assert not (options.out / "runs").exists()


def test_judges_within_judges_are_known_by_their_content(held_out, tmp_path):
    moved = shutil.copytree(held_out, tmp_path / "moved")
    one, two = (json.dumps({"ensemble": ["constant", {"reward_model": str(path)}]}) for path in (held_out, moved))
    assert judge_settings(one) == judge_settings(two)
    assert judge_content(one) == judge_content(two) != {}
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "alpacafarm_reward_mean": 5.0}))
    assert judge_content(one) != judge_content(two)


def test_the_sandbox_has_judges_by_name():
    data = load_dataset("sandbox")
    asked, reference = data.instructions("eval")[:4], data.references("eval")[:4]
    for name in ("human", '{"judge": "sim_gpt4"}', "gold"):
        assert make_own_judge(name, data).score(asked, reference).tolist() == [0.5] * 4
    assert make_own_judge("gold", data).score(asked, ["", *reference[1:]]).tolist() == [0, 0.5, 0.5, 0.5]


def test_what_decides_no_verdict_may_change(monkeypatch):
    one, two = (json.dumps({"pool": "eval", "base_url": "http://a/v1", "budget_usd": usd}) for usd in (1, 2))
    assert judge_settings(one) == judge_settings(two)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://a/v1/")
    by_environment = json.dumps({"pool": "eval"})
    assert judge_settings(by_environment) == judge_settings(one)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://b/v1")
    assert judge_settings(by_environment) != judge_settings(one)
    assert judge_settings("human") != judge_settings(None)
    with pytest.raises(AlpacaFarmError):
        judge_settings("{")


def test_a_policy_that_judges_is_known_by_its_content():
    text = json.dumps({"rating": {"policy": str(POLICY)}})
    assert hash_model(POLICY).items() <= judge_content(text).items()
    assert str(POLICY) not in json.dumps(judge_settings(text))


def test_a_pools_prompts_and_models_are_content(tmp_path):
    def content_of(words="Which is better?", model="one", comment=""):
        parts = f"[{{user: {words!r}}}, {{items: true}}]"
        prompt = f"{{name: asked, format: label, layout: chat, parts: {parts}}}"
        member = "{name: only, role: gpt4, prompt: ./asked.yaml, max_tokens: 9}"
        files = {"asked": prompt, "models": f"model: {model}", "pool": f"{comment}\nname: mine\nannotators: [{member}]"}
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text + "\n", encoding="utf-8")
        spec = {"pool": str(tmp_path / "pool.yaml"), "models": str(tmp_path / "models.yaml"), "base_url": "http://a/v1"}
        return judge_content(json.dumps(spec))

    assert content_of() == content_of(comment="# the same in other words")
    assert content_of() != content_of(words="And now?")
    assert content_of() != content_of(model="two")
