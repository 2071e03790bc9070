"""The over-optimization study as a command: its cells, a wrapper of one's own by name, resuming, and what it writes."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import overoptimization_worlds
import pytest
from written import rows_of

from alpacafarm_env.benchmarks.harness import sources
from alpacafarm_env.benchmarks.harness.stored import cell_file
from alpacafarm_env.benchmarks.overoptimization import command as overoptimization
from alpacafarm_env.benchmarks.overoptimization import page as overoptimization_page
from alpacafarm_env.benchmarks.overoptimization import plans as overoptimization_plans
from alpacafarm_env.benchmarks.overoptimization.command import OveroptimizationOptions, reward_models_of
from alpacafarm_env.benchmarks.overoptimization.curves import COLUMNS
from alpacafarm_env.benchmarks.overoptimization.page import measured_by
from alpacafarm_env.benchmarks.overoptimization.plans import Sizes, make_plans
from alpacafarm_env.benchmarks.overoptimization.treatments import TREATMENTS
from alpacafarm_env.errors import CheckpointError, UnknownNameError

TINY = replace(overoptimization_worlds.TINY, num_samples=4, ppo_steps=2, seldom=1)
OWN = '''from gymnasium.vector import VectorWrapper

from alpacafarm_env.benchmarks.overoptimization.treatments import Treatment


class ShortAnswers(VectorWrapper):
    """The reward, less 0.02 for each character beyond 30."""

    def step(self, actions):
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        excess = (infos["response_length"] - 30).clip(0)
        return observations, rewards - 0.02 * excess, terminated, truncated, infos


class Negated(VectorWrapper):
    def step(self, actions):
        observations, rewards, *rest = self.env.step(actions)
        return observations, -rewards, *rest


TREATMENT = Treatment("short_answers", "25 % flips, long answers cost", flip=0.25, wrap=ShortAnswers)
'''
LENGTHS = """from alpacafarm_env.benchmarks.overoptimization.treatments import Treatment


class Lengths:
    name = "lengths"

    def score(self, instructions, responses):
        return [float(len(text)) for text in responses]


TREATMENT = Treatment("NAME", "Long", members=0, oracle=lambda cell: Lengths())
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "short_answers_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "short_answers_of_mine", raising=False)  # of another test's folder
    return "short_answers_of_mine:TREATMENT"


def options_of(out, *treatments, **changes):
    given = {"out": out, "treatments": treatments, "seeds": 1, "processes": 1, "sizes": TINY}
    return OveroptimizationOptions(**{**given, **changes})


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(overoptimization_page, "draw_compared", lambda *args: ())
    monkeypatch.setattr(overoptimization_page, "draw_groups", lambda *args: ())


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
    assert re.search(r"\[ *\d+%, .* left\] short_answers \(\w{8}\), ppo, seed 0: gold", shown.err)
    assert json.loads((out / "manifest.json").read_text())["complete"]

    # What is stored is not run again, and results of other settings are refused and stay.
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    monkeypatch.setattr(overoptimization, "run_plan", lambda plan, tell: pytest.fail(f"{plan.cell} runs again"))
    assert overoptimization.run(options_of(out, own)) == 0
    find, other = overoptimization_plans.find_treatment, {"model.safetensors": "sha256:other"}
    with pytest.raises(CheckpointError, match=r"sizes.num_prompts was 3, is 2"):
        overoptimization.run(options_of(out, own, sizes=replace(TINY, num_prompts=2)))
    changed = r"short_answers \(flip was 0.25, is 0.2, in .*\)\. Choose another --out"
    for module, name, now, message in (
        (overoptimization_plans, "find_treatment", lambda spec: replace(find(spec), flip=0.2), changed),
        (sources, "hash_model", lambda folder: other, "model.safetensors of the sandbox's policy"),
    ):
        with monkeypatch.context() as context:
            context.setattr(module, name, now)
            with pytest.raises(CheckpointError, match=message):
                overoptimization.run(options_of(out, own))
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


@pytest.mark.usefixtures("no_figures")
def test_a_treatment_that_is_edited_is_run_anew(tmp_path, own, monkeypatch):
    out = tmp_path / "out"

    def proxies(source):
        (tmp_path / "short_answers_of_mine.py").write_text(source)
        monkeypatch.delitem(sys.modules, "short_answers_of_mine", raising=False)  # as another call
        assert overoptimization.run(options_of(out, own, methods=("best_of_n",))) == 0
        return [float(row["proxy"]) for row in rows_of(out)]

    before, dearer = proxies(OWN), proxies(OWN.replace("- 0.02 *", "- 20 *"))
    assert all(two < one - 1 for one, two in zip(before, dearer, strict=True))
    assert proxies(OWN) == before
    assert len(list((out / "cells").glob("short_answers-*-best_of_n-seed-0.json"))) == 2
    assert len(list((out / "cells").glob("reward-model*"))) == 1


@pytest.mark.usefixtures("no_figures")
def test_an_edit_while_the_study_runs_is_never_mixed_in(tmp_path, monkeypatch, capsys):
    """The cells that begin after it, in processes of their own, are refused; the others go on."""
    out, run_cells = tmp_path / "out", overoptimization.run_cells
    for name in ("steady", "edited"):
        (tmp_path / f"{name}_of_mine.py").write_text(LENGTHS.replace("NAME", name))
    monkeypatch.syspath_prepend(tmp_path)

    def edit_meanwhile(*args, **options):
        (tmp_path / "edited_of_mine.py").write_text(
            LENGTHS.replace("NAME", "edited").replace("len(text)", "-len(text)")
        )
        return run_cells(*args, **options)

    out.mkdir()
    (out / "manifest.json").write_text(json.dumps({"name": "overoptimization"}))
    for name in ("reward_models.csv", "report.html"):
        (out / name).write_text("of an earlier call")
    options = options_of(
        out, "edited_of_mine:TREATMENT", "steady_of_mine:TREATMENT", methods=("best_of_n",), processes=2
    )
    with monkeypatch.context() as context:
        context.setattr(overoptimization, "run_cells", edit_meanwhile)
        assert overoptimization.run(options) == 1
    assert "edited_of_mine:TREATMENT was edited after the study began" in capsys.readouterr().err
    assert {row["treatment"] for row in rows_of(out)} == {"steady"}
    assert not list((out / "runs").glob("edited*"))
    assert not (out / "reward_models.csv").exists()


@pytest.mark.usefixtures("no_figures")
def test_a_wrapper_decides_what_is_trained_on_and_what_is_measured(tmp_path, own):
    out, negated = tmp_path / "out", own.replace("TREATMENT", "Negated")
    assert overoptimization.run(options_of(out, "ann", negated)) == 0
    proxies = {
        (row["treatment"], row["method"]): float(row["proxy"])
        for row in rows_of(out)
        if row["step"] == "0" or row["n"] == "1"
    }
    for method in ("ppo", "best_of_n"):  # of the same responses
        assert proxies["Negated", method] == pytest.approx(-proxies["ann", method], abs=1e-5) != 0
    runs = sorted((out / "runs").glob("*-ppo-seed-0"))
    first = [json.loads((run / "metrics.jsonl").read_text().splitlines()[0]) for run in runs]
    assert first[0]["score/mean"] == pytest.approx(-first[1]["score/mean"], abs=1e-5) != 0


def test_a_cell_that_fails_leaves_the_others_and_a_status(tmp_path, own, capsys, monkeypatch):
    run_plan = overoptimization.run_plan

    def fragile(plan, tell):
        if plan.kind == "ppo":
            raise RuntimeError("out of luck")
        return run_plan(plan, tell)

    written = []
    monkeypatch.setattr(overoptimization, "run_plan", fragile)
    monkeypatch.setattr(
        overoptimization,
        "write_results",
        lambda study, plans, rows: written.extend(rows["methods"]),
    )
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
    def planned(treatments, methods, num_seeds, sizes=TINY):
        return make_plans(treatments, methods, range(num_seeds), tmp_path, sizes).values()

    models, samples, runs = planned([each.name for each in TREATMENTS], ("ppo", "best_of_n"), 5, Sizes())
    assert (len(samples), len(runs)) == (5, 2 * 5 * len(TREATMENTS))
    assert len(models) == 5 * 10  # eight kinds of labels, and two more members of those of 25 %
    assert len({plan.cell for plan in runs}) == len(runs)
    assert len({plan.model for plan in models}) == len(models)
    rows = [
        {**vars(plan.labels), "member": plan.member, "seed": plan.seed, "accuracy_gold": place}
        for place, plan in enumerate(models)
    ]
    found = {
        (row["treatment"], row["seed"], row["member"]): row["accuracy_gold"] for row in reward_models_of(runs, rows)
    }
    assert len(found) == 5 * (8 + 3 * 3)
    assert found["ann", 2, 0] == found["uwo_3", 2, 0] == found["wco_3", 2, 0]
    assert len({found["uwo_3", 2, member] for member in range(3)}) == 3
    # As many instructions as there are, not as many as were asked for, are what is said to be measured.
    assert measured_by(["best_of_n"], Sizes(num_prompts=10_000), 1).num_instructions == {"best_of_n": 805}
    assert [len(part) for part in planned(["none"], ("ppo",), 2)] == [2, 0, 2]


def test_calls_for_some_methods_and_treatments_add_up_to_one_table(tmp_path):
    (before,) = make_plans(["none"], ["quark"], [0], tmp_path, TINY)["methods"]
    file = cell_file(tmp_path, before.cell)
    file.parent.mkdir()
    file.touch()
    asked = make_plans(["ann"], ["best_of_n"], [0, 1], tmp_path, TINY)
    cells = [(plan.treatment.name, plan.kind, plan.seed) for plan in asked["methods"]]
    assert cells == [("ann", "best_of_n", 0), ("ann", "best_of_n", 1), ("none", "quark", 0)]
    assert [plan.seed for plan in asked["samples"]] == [0, 1]
    assert before not in make_plans(["ann"], ["best_of_n"], [1], tmp_path, TINY)["methods"]


def test_quick_changes_the_defaults_that_are_not_given():
    quick = OveroptimizationOptions.parse(["--quick"])
    assert (quick.seeds, tuple(quick.specs), quick.folder("x").name) == (2, ("none", "ann", "uwo_3"), "x-quick")
    assert (quick.chosen_sizes.ppo_steps, quick.chosen_sizes.ns[-1]) == (6, 64)
    full = OveroptimizationOptions.parse(["--methods", "ppo", "--treatments", "ann", "none"])
    assert (full.seeds, tuple(full.specs), full.methods) == (5, ("ann", "none"), ("ppo",))
    assert full.chosen_sizes == Sizes()
    weak = OveroptimizationOptions.parse(["--kl-coef", "0.02"])
    assert weak.chosen_sizes == replace(Sizes(), kl_coef=0.02)
    assert len(OveroptimizationOptions().specs) == len(TREATMENTS)


def test_help_does_not_wait_for_torch():
    command = """
import sys
from alpacafarm_env.benchmarks.overoptimization.command import OveroptimizationOptions
try:
    OveroptimizationOptions.parse(["--help"])
except SystemExit:
    print("loaded:", *{"torch", "transformers", "matplotlib"} & sys.modules.keys())
"""
    run = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seeds": 0}, "--seeds: expected 1 or more"),
        ({"processes": 0}, "--processes: expected 1 or more, got 0"),
        ({"kl_coef": -0.1}, "--kl-coef: expected 0 or more, got -0.1"),
        ({"kl_coef": float("nan")}, "--kl-coef: expected 0 or more, got nan"),
        ({"data": "mine"}, "--data: expected none"),
        ({"methods": ()}, "--methods: expected one or more"),
    ],
)
def test_bad_options_are_named(changes, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        OveroptimizationOptions(**changes)


def test_a_name_is_taken_once(tmp_path, monkeypatch):
    (tmp_path / "taken_treatment.py").write_text(OWN.replace('"short_answers"', '"ann"'))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownNameError, match="got 'ann', which is taken by the study itself"):
        overoptimization.run(options_of(tmp_path / "out", "taken_treatment:TREATMENT"))
    assert not (tmp_path / "out").exists()
