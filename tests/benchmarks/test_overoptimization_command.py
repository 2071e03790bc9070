"""The over-optimization study as a command: its cells, a wrapper of one's own by name, resuming, and what it writes."""

import json
import re
import sys
from dataclasses import replace

import overoptimization_worlds
import pytest
from written import rows_of

from alpacafarm_env.agents import PPOConfig
from alpacafarm_env.benchmarks.experiment.samples import SampleRun
from alpacafarm_env.benchmarks.experiment.treated import Sizes
from alpacafarm_env.benchmarks.experiment.treatments import TREATMENTS
from alpacafarm_env.benchmarks.harness import sources
from alpacafarm_env.benchmarks.harness.stored import cell_file
from alpacafarm_env.benchmarks.overoptimization import __main__ as overoptimization
from alpacafarm_env.benchmarks.overoptimization.__main__ import OveroptimizationOptions, make_plans, settings
from alpacafarm_env.benchmarks.overoptimization.analysis import COLUMNS
from alpacafarm_env.errors import CheckpointError

TINY = replace(overoptimization_worlds.TINY, num_samples=4, steps=(0, 1, 2))
OWN = '''from gymnasium.vector import VectorWrapper

from alpacafarm_env.benchmarks.experiment.treatments import Treatment


class ShortAnswers(VectorWrapper):
    """The reward, less 0.02 for each character beyond 30."""

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        excess = (infos["response_length"] - 30).clip(0)
        return observations, rewards - 0.02 * excess, terminated, truncated, infos


TREATMENT = Treatment("short_answers", "25 % flips, long answers cost", flip=0.25, wrap=ShortAnswers)
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "short_answers_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "short_answers_of_mine", raising=False)  # of another test's folder
    return "short_answers_of_mine:TREATMENT"


def options_of(out, *treatments, **changes):
    given = {"out": out, "treatments": treatments, "seeds": 1, "processes": 1, "sizes": TINY}
    return OveroptimizationOptions(**{**given, **changes})


def test_a_wrapper_of_one_s_own_joins_by_name_and_nothing_runs_twice(tmp_path, own, capsys, monkeypatch):
    out = tmp_path / "out"
    assert overoptimization.run(options_of(out, own)) == 0
    rows = rows_of(out)
    assert tuple(rows[0]) == COLUMNS
    places = [(row["treatment"], row["method"], row["step"], row["n"]) for row in rows]
    best_of_n = [("short_answers", "best_of_n", "", str(n)) for n in (1, 2, 4)]
    assert places == best_of_n + [("short_answers", "ppo", str(step), "") for step in (0, 1, 2)]
    (model,) = rows_of(out, "reward_models.csv")
    assert (model["treatment"], model["flip"], model["num_labels"]) == ("short_answers", "0.25", "64")
    assert 50 < int(model["num_trained"]) <= 64  # ties are left out
    report = (out / "report.html").read_text(encoding="utf-8")
    shown = capsys.readouterr()
    for text in (report, shown.out):
        assert "25 % flips, long answers cost" in text
    assert re.search(r"num_labels</td><td[^>]*>64<", report)  # of the treatment's 10,000 labels those that it got
    assert "10,000" not in report
    assert re.search(r"\[ *\d+%, .* left.*\] short_answers \(\w{8}\), ppo, seed 0, step 2 of 2: proxy", shown.err)
    assert json.loads((out / "manifest.json").read_text())["complete"]

    # What is stored is not run again, and results of other settings are refused and stay.
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    for name in ("run_experiment", "run_best_of_n", "train_reward_model"):
        monkeypatch.setattr(overoptimization, name, lambda plan, tell: pytest.fail(f"{plan.cell} runs again"))
    monkeypatch.setattr(SampleRun, "draw", lambda plan, tell: pytest.fail(f"{plan.cell} runs again"))
    assert overoptimization.run(options_of(out, own)) == 0
    with pytest.raises(CheckpointError, match=r"sizes.num_prompts was 3, is 2"):
        overoptimization.run(options_of(out, own, sizes=replace(TINY, num_prompts=2)))
    with monkeypatch.context() as context:
        context.setattr(sources, "hash_model", lambda folder: {"model.safetensors": "sha256:other"})
        with pytest.raises(CheckpointError, match="model.safetensors of the sandbox's policy"):
            overoptimization.run(options_of(out, own))
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


def test_a_treatment_that_is_edited_is_run_anew(tmp_path, own, monkeypatch):
    def cells(source):
        (tmp_path / "short_answers_of_mine.py").write_text(source)
        monkeypatch.delitem(sys.modules, "short_answers_of_mine", raising=False)  # as another call
        runs = make_plans(options_of(tmp_path / "out", own))
        return {run.cell for run in runs}, {model.cell for run in runs for model in run.members}

    (before, models), (after, same) = cells(OWN), cells(OWN.replace("- 0.02 *", "- 20 *"))
    assert not before & after
    assert models == same
    assert cells(OWN)[0] == before


def test_a_cell_that_fails_leaves_the_others_and_a_status(tmp_path, own, capsys, monkeypatch):
    def fail(plan, tell):
        raise RuntimeError("out of luck")

    written = []
    monkeypatch.setattr(overoptimization, "run_experiment", fail)
    monkeypatch.setattr(overoptimization, "write_results", lambda study, runs, rows: written.extend(rows))
    assert overoptimization.run(options_of(tmp_path / "out", own)) == 1
    assert {row["method"] for row in written} == {"best_of_n"}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert list(manifest["cells"]["failed"].values()) == ["RuntimeError: out of luck"]
    assert re.search(r"error: cells that failed: short_answers \(\w{8}\), ppo, seed 0\.", capsys.readouterr().err)
    written.clear()
    assert overoptimization.run(options_of(tmp_path / "other", own, methods=("ppo",))) == 1
    assert written == []
    assert "error: no run was finished, why is above." in capsys.readouterr().err


def test_reward_models_are_trained_once_for_all_that_share_them(tmp_path):
    runs = make_plans(options_of(tmp_path, *(each.name for each in TREATMENTS), seeds=5, sizes=Sizes()))
    models = list({model.cell: model for run in runs for model in run.members}.values())
    assert len({run.cell for run in runs}) == len(runs) == sum(5 * (1 if each.kl_coef else 2) for each in TREATMENTS)
    assert len(models) == 5 * 10  # eight kinds of labels, and two more members of those of 25 %
    assert len({model.target for model in models}) == len(models)
    cells = {(run.treated.name, run.seed): [model.cell for model in run.members] for run in runs}
    assert cells["ann", 2][0] == cells["uwo_3", 2][0] == cells["wco_3", 2][0]
    assert len(set(cells["uwo_3", 2])) == 3
    (several,) = (run.members for run in runs if run.cell.startswith("uwo_3") and (run.agent, run.seed) == ("ppo", 2))
    assert len({model.training_seed for model in several}) == 3


def test_calls_for_some_methods_and_treatments_add_up_to_one_table(tmp_path):
    (before,) = make_plans(options_of(tmp_path, "none", methods=("quark",)))
    file = cell_file(tmp_path, before.cell)
    file.parent.mkdir()
    file.touch()
    runs = make_plans(options_of(tmp_path, "ann", methods=("best_of_n",), seeds=2))
    cells = [(run.treated.name, run.agent, run.seed) for run in runs]
    assert cells == [("ann", "best_of_n", 0), ("ann", "best_of_n", 1), ("none", "quark", 0)]


def test_a_treatment_has_its_own_kl_penalty_under_ppo_alone(tmp_path):
    options = options_of(tmp_path, "kl_025", "ann", methods=("ppo", "best_of_n", "quark"), seeds=1)
    runs = {(run.treated.name, run.agent): run for run in make_plans(options)}
    assert [method for name, method in runs if name == "kl_025"] == ["ppo"]
    weak, usual = runs["kl_025", "ppo"], runs["ann", "ppo"]
    assert (weak.config(PPOConfig).kl_coef, usual.config(PPOConfig).kl_coef) == (0.025, 0.05)
    assert [each.cell for each in weak.members] == [each.cell for each in usual.members]
    assert settings(weak) == settings(usual)


def test_quick_changes_the_defaults_that_are_not_given():
    quick = OveroptimizationOptions.parse(["--quick"])
    assert (quick.seeds, tuple(quick.specs), quick.folder("x").name) == (2, ("none", "ann", "uwo_3"), "x-quick")
    assert (quick.chosen_sizes.steps[-1], quick.chosen_sizes.num_samples) == (6, 64)
    full = OveroptimizationOptions.parse(["--methods", "ppo", "--treatments", "ann", "none"])
    assert (full.seeds, tuple(full.specs), full.methods) == (5, ("ann", "none"), ("ppo",))
    assert full.chosen_sizes == Sizes()
    assert len(OveroptimizationOptions().specs) == len(TREATMENTS)


@pytest.mark.parametrize("changes", [{"data": "x"}, {"methods": ()}])
def test_bad_options_are_named(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}: expected"):
        OveroptimizationOptions(**changes)
