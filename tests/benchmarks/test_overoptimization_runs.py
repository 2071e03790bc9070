"""Cells of the over-optimization study in their smallest form: each is run, interrupted, resumed and compared."""

import json
import shutil
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from overoptimization_worlds import TINY

from alpacafarm_env import sandbox
from alpacafarm_env.agents import LanguageModel
from alpacafarm_env.agents.evaluation import exact_response_kl, sequence_kl
from alpacafarm_env.agents.loop import keyed_generator
from alpacafarm_env.benchmarks.experiment import engine, reward_models
from alpacafarm_env.benchmarks.experiment.engine import read_evaluation
from alpacafarm_env.benchmarks.experiment.engine import run as run_experiment
from alpacafarm_env.benchmarks.experiment.reward_models import sample
from alpacafarm_env.benchmarks.experiment.treated import Sizes, TreatmentRun
from alpacafarm_env.benchmarks.experiment.treated import reward_model as reward_model_of
from alpacafarm_env.benchmarks.experiment.treatments import Labels
from alpacafarm_env.benchmarks.overoptimization.__main__ import table_row
from alpacafarm_env.benchmarks.overoptimization.analysis import COLUMNS
from alpacafarm_env.benchmarks.overoptimization.runs import best_rows, choose, run_best_of_n
from alpacafarm_env.errors import CheckpointError, DataError
from alpacafarm_env.oracles import RewardModel
from alpacafarm_env.sandbox.gold import GoldOracle

OWN = """from alpacafarm_env import sandbox
from alpacafarm_env.benchmarks.experiment.treatments import Treatment
GOLD = Treatment("true", "True", members=0, oracle=sandbox.gold_oracle())
class Lengths:
    name = "lengths"
    def score(self, instructions, responses):
        import numpy as np
        return np.array([float(len(text)) for text in responses])
LONG = Treatment("long", "Long", members=0, oracle=Lengths())
class Silent(Lengths):
    def score(self, instructions, responses):
        return super().score(instructions, responses) * float("nan")
SILENT = Treatment("silent", "Silent", members=0, oracle=Silent())
"""
LABELS = Labels("sim_eval", 0.25, 64)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Two treatments that need no reward model."""
    (tmp_path / "own_rewards_of_runs.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rewards_of_runs", raising=False)  # of another test's folder
    return "own_rewards_of_runs:GOLD", "own_rewards_of_runs:LONG"


def silent(news):
    """Nobody is told."""


def train(model):
    return reward_models.train(model, silent)


def without_seconds(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def run(plan):
    """The rows of a method, as the table has them."""
    work = run_best_of_n if plan.agent == "best_of_n" else run_experiment
    return [table_row(row) for row in work(plan, silent)]


def reward_model(out, labels=LABELS, member=0, seed=0):
    return reward_model_of(labels, member, seed, out, TINY)


def samples_of(out):
    return best_of_n(out, "none").samples


def best_of_n(out, treatment, sizes=TINY):
    return TreatmentRun(agent="best_of_n", seed=0, out=out, sizes=sizes, treatment=treatment)


def ppo(out, treatment):
    return TreatmentRun(agent="ppo", seed=0, out=out, sizes=TINY, treatment=treatment)


def files_of(folder, *names):
    """Content of the files below a folder, by their path."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for name in names
        for file in sorted((folder / name).rglob("*"))
        if file.is_file()
    }


class Interrupted(BaseException):
    """As sudden as Ctrl-C."""


def stop(*args, **kwargs):
    raise Interrupted


def test_a_reward_model_is_trained_measured_and_resumed(tmp_path, monkeypatch):
    model = reward_model(tmp_path / "whole", member=1)
    (row,) = train(model)
    assert (row["judge"], row["flip"], row["member"], row["num_pairs"]) == ("sim_eval", 0.25, 1, 16)
    assert row["num_trained"] == len(model.pairs()) <= 64
    assert 0 <= row["accuracy_gold"] <= 1
    assert 0 <= row["calibration_error"] <= 1

    again = replace(model, out=tmp_path / "killed")
    with monkeypatch.context() as context:
        context.setattr(reward_models, "measure", stop)
        with pytest.raises(Interrupted):
            train(again)
    with monkeypatch.context() as context:
        context.setattr(reward_models, "fit", stop)  # what is trained is not trained again
        assert without_seconds(train(again)) == without_seconds([row])
    weights = [(each.target / "model.safetensors").read_bytes() for each in (model, again)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("start", [{}, {"layers": 1}])
def test_a_unit_of_any_reward_is_its_spread_among_sft_s_answers_to_an_instruction(tmp_path, start):
    model = reward_model(tmp_path, replace(LABELS, **start))
    train(model)
    instructions = sandbox.SANDBOX.instructions("val")[: TINY.num_val]
    answers = sample(
        LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=64), instructions, "calibration", 4
    )
    scores = RewardModel(model.target).score([each for each in instructions for _ in range(4)], answers).reshape(-1, 4)
    assert scores.mean() == pytest.approx(0, abs=1e-4)
    assert scores.var(axis=1, ddof=1).mean() == pytest.approx(1, abs=1e-4)


def test_a_smaller_reward_model_keeps_the_first_layers(tmp_path):
    model = reward_model(tmp_path, Labels("sim_eval", 0.0, 64, layers=1))
    train(model)
    sizes = [
        json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        for folder in (sandbox.POLICY, model.target)
    ]
    assert sizes == [3, 1]
    layer = LanguageModel.from_pretrained(next(tmp_path.rglob("trunk"))).model.model.layers[0].state_dict()
    first, *_, last = (each.state_dict() for each in LanguageModel.from_pretrained(sandbox.POLICY).model.model.layers)
    assert all(torch.equal(layer[name], first[name]) for name in first)
    assert not all(torch.equal(layer[name], last[name]) for name in last)
    assert np.isfinite(RewardModel(model.target).score(sandbox.SANDBOX.instructions("eval")[:2], ["Yes.", "No."])).all()
    with pytest.raises(DataError, match="at most the 3 of .*, got 4"):
        train(replace(model, layers=4, out=tmp_path / "b"))


def test_samples_are_those_of_the_policy_and_judged(tmp_path):
    plan = samples_of(tmp_path / "a")
    plan.draw(silent)
    samples = plan.read()
    assert samples.index.shape == (3, 6)
    distinct = samples.responses
    assert set(samples.index.ravel().tolist()) == set(range(len(distinct)))
    assert not distinct.duplicated(["prompt", "text"]).any()
    assert (distinct.prompt.to_numpy()[samples.index] == np.arange(3)[:, None]).all()
    np.testing.assert_array_equal(distinct.gold, GoldOracle().score(samples.prompts, list(distinct.text)))
    assert distinct.length.tolist() == distinct.text.str.len().tolist()
    replace(plan, out=tmp_path / "b").draw(silent)
    assert files_of(tmp_path / "a", "samples") == files_of(tmp_path / "b", "samples")
    # The first samples of a larger study are those of a smaller one.
    few = replace(plan, out=tmp_path / "few", num_samples=2)
    few.draw(silent)
    assert texts_of(few.read()) == [row[:2] for row in texts_of(samples)]
    for damaged in (b"damaged", (plan.folder / "index.npy").read_bytes()):  # or another study's
        (few.folder / "index.npy").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"expected the samples of seed 0, got .* To draw them anew remove"):
            few.read()


def texts_of(samples):
    return samples.responses.text.to_numpy()[samples.index].tolist()


def test_best_of_n_is_over_the_same_instructions_where_some_samples_have_no_verdict(tmp_path, own):
    plan = best_of_n(tmp_path, own[1], replace(TINY, num_samples=4))
    index = np.arange(12).reshape(3, 4)
    scores = np.array([0.0, 1, 2, 3, 0, 1, np.nan, np.nan, *[np.nan] * 4])
    measures = {name: np.arange(12.0) for name in ("gold", "win_rate_simulated", "win_rate_human", "length")}
    rows = best_rows(plan, index, pd.DataFrame({**measures, "proxy": scores, "disagreement": np.nan}))
    # The second instruction stays at its best of 2; the third, without any verdict, is left out of all.
    first, second = [1.5, 2 / 6 * 2 + 3 / 6 * 3 + 1 / 6, 3.0], [4.5, 5.0, 5.0]
    assert [row["gold"] for row in rows] == pytest.approx(np.mean([first, second], axis=0).tolist())


def test_best_of_n_chooses_by_its_treatment_from_the_same_samples(tmp_path, own):
    samples_of(tmp_path).draw(silent)
    plans = [best_of_n(tmp_path, name) for name in own]
    rows = [run(plan) for plan in plans]
    assert all(tuple(row) == COLUMNS for table in rows for row in table)
    # At n = 1 nothing is chosen: what is measured is the same, whoever is the proxy.
    for name in ("gold", "win_rate_simulated", "win_rate_human", "length"):
        assert rows[0][0][name] == pytest.approx(rows[1][0][name], rel=1e-12)  # sums in another order
    by_gold, by_length = (table[-1] for table in rows)
    assert by_gold["gold"] == by_gold["proxy"] > by_length["gold"]
    assert by_length["length"] == by_length["proxy"] > by_gold["length"]
    assert by_length["disagreement"] is None
    samples = samples_of(tmp_path).read()
    stored = read_evaluation(plans[1], 6)
    assert stored["splits"]["eval"]["responses"] == [max(row, key=len) for row in texts_of(samples)]
    assert read_evaluation(plans[1], 1)["splits"]["eval"]["responses"] == [row[0] for row in texts_of(samples)]
    assert table_row({**plans[1].facts, **stored["rows"][0]}) == by_length
    assert choose(samples.index, np.full(len(samples.responses), np.nan)).tolist() == samples.index[:, 0].tolist()


def test_ppo_starts_at_a_kl_of_0_with_the_same_answers_for_all_treatments(tmp_path, own):
    plans = [ppo(tmp_path, name) for name in own]
    rows = [run(plan) for plan in plans]
    for table in rows:
        assert all(tuple(row) == COLUMNS for row in table)
        assert [row["step"] for row in table] == [0, 1, 3]
        assert table[0]["kl_exact"] == 0
        assert all(row["kl_exact"] > 0 for row in table[1:])
    first, last = ([read_evaluation(plan, step)["splits"]["eval"] for plan in plans] for step in (0, 3))
    assert first[0]["responses"] == first[1]["responses"]
    assert first[0]["instructions"] == last[0]["instructions"] == last[1]["instructions"]
    assert rows[0][0]["gold"] == rows[1][0]["gold"] == rows[0][0]["proxy"]
    trained = [json.loads((plan.folder / "metrics.jsonl").read_text().split("\n")[0]) for plan in plans]
    assert trained[0]["tokens/mean"] == trained[1]["tokens/mean"]  # the first step's responses are the same ones
    assert trained[0]["loss"] != trained[1]["loss"]


@pytest.mark.parametrize(
    ("method", "treatment"),
    [
        ("ppo", "uwo_3"),
        ("expert_iteration", "ann"),
        pytest.param("quark", "ann", marks=pytest.mark.slow),
        pytest.param("dpo", "ann", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_method_ends_with_the_same_bytes(tmp_path, monkeypatch, method, treatment):
    sizes = replace(TINY, steps=(0, 1, 12)) if method == "expert_iteration" else TINY  # two rounds
    changed = Sizes.changed
    monkeypatch.setattr(Sizes, "changed", lambda *given: tuple({**dict(changed(*given)), "save_every": 2}.items()))
    same = {"agent": method, "seed": 0, "sizes": sizes, "treatment": treatment}
    whole, killed = (TreatmentRun(out=tmp_path / name, **same) for name in ("whole", "killed"))
    for model in whole.members:
        train(model)
    shutil.copytree(whole.out / "reward_models", killed.out / "reward_models")
    rows = run(whole)
    assert tuple(row["step"] for row in rows) == whole.places
    assert rows[0]["kl_exact"] == 0
    assert all(row["kl_exact"] > 0 for row in rows[1:])
    write = engine.write_evaluation
    for place in whole.places[1:]:  # between checkpoints, and after the last one but before its evaluation
        with monkeypatch.context() as context:
            stopping = lambda plan, now, *content, at=place: stop() if now == at else write(plan, now, *content)
            context.setattr(engine, "write_evaluation", stopping)
            with pytest.raises(Interrupted):
                run(killed)
    assert run(killed) == rows
    stored = files_of(whole.folder, "evaluations")
    assert stored == files_of(killed.folder, "evaluations")
    assert len(stored) == 3

    # A run that is removed takes what was measured of it along: no curve is of two runs.
    shutil.rmtree(killed.folder)
    with pytest.raises(CheckpointError, match=r"step-00000\.json.* remove .*seed-0"):
        read_evaluation(killed, 0)


def test_dpo_learns_from_its_treatment_s_labels_and_from_no_reward(tmp_path):
    """Two treatments of equal labels and other rewards have one policy of DPO; one without labels has none."""
    same = {"agent": "dpo", "seed": 0, "out": tmp_path, "sizes": TINY}
    plans = [TreatmentRun(**same, treatment=treatment) for treatment in ("ann", "uwo_3")]
    for model in plans[1].members:
        train(model)
    first, second = (run(plan)[-1] for plan in plans)
    assert first["gold"] == second["gold"]
    assert first["proxy"] != second["proxy"]


def test_the_kl_is_that_of_the_sampled_responses():
    policy = LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=16)
    policy.add_reference()
    instructions = sandbox.SANDBOX.instructions("eval")[:4]

    def both():
        rollouts = policy.generate(instructions, generator=keyed_generator(0, "x"), num_samples=40, temperature=0.7)
        return exact_response_kl(policy, rollouts, 0.7), sequence_kl(policy, rollouts, 0.7).numpy()

    assert (both()[0] == 0).all()
    policy.model.lm_head.weight.data *= 1.1
    exact, sampled = both()
    assert (exact >= 0).all()
    error = (exact - sampled).std() / np.sqrt(len(exact))
    assert abs(exact.mean() - sampled.mean()) < 4 * error  # two unbiased estimates of one number
    assert exact.std() < sampled.std()


def test_other_settings_and_missing_reward_models_are_told(tmp_path, own):
    with pytest.raises(
        DataError, match=r"ann .*, ppo, seed 0: expected its reward models, found none for: reward model"
    ):
        run(ppo(tmp_path, "ann"))
    with pytest.raises(CheckpointError, match="expected the samples of seed 0, got"):
        run(best_of_n(tmp_path, own[0]))
    samples_of(tmp_path).draw(silent)
    run(best_of_n(tmp_path, own[0]))
    with pytest.raises(DataError, match="silent .*, best_of_n, seed 0, place 1"):
        run(best_of_n(tmp_path, "own_rewards_of_runs:SILENT"))
    with pytest.raises(CheckpointError, match="made with other settings"):
        run(best_of_n(tmp_path, own[0], replace(TINY, num_val=5)))
