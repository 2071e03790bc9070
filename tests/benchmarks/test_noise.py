"""The study of noise with known gold: its command in small, what cells share, and claims on curves that are made up."""

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from written import rows_of

from alpacafarm_env.benchmarks.experiment.faults import AGREEMENT, CLEAN, KINDS, DialPlan
from alpacafarm_env.benchmarks.experiment.fresh import Plan, Sizes, draw_pairs
from alpacafarm_env.benchmarks.experiment.treated import Sizes as RunSizes
from alpacafarm_env.benchmarks.harness.labels import Setting
from alpacafarm_env.benchmarks.harness.page import read_table
from alpacafarm_env.benchmarks.harness.stored import unpack
from alpacafarm_env.benchmarks.noise import __main__ as noise
from alpacafarm_env.benchmarks.noise.__main__ import NoiseOptions, run
from alpacafarm_env.benchmarks.noise.analysis import PREDICTED, all_claims, bands, gao, outcomes
from alpacafarm_env.benchmarks.noise.dials import dial_claims
from alpacafarm_env.benchmarks.noise.matched import ONCE, OncePlan
from alpacafarm_env.benchmarks.noise.page import page
from alpacafarm_env.benchmarks.surrogates.scarcity import Curve, tables_of

TRAINING = RunSizes(num_eval=4, steps=(0, 1), rollouts=16)
TINY = Sizes(
    labels=(16, 64),
    flips=(0.0, 0.25, 0.35),
    num_prompts=4,
    num_samples=8,
    num_val=6,
    training=TRAINING,
    seeds_trained=1,
)
FULL = Sizes()
NS = [2**power for power in range(11)]
KL = np.array([math.log(n) - (n - 1) / n for n in NS])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a study in small."""
    out = tmp_path_factory.mktemp("noise")
    assert run(options(out)) == 0
    return out


def key_of(preference):
    return preference.instruction, preference.responses


def options(out, **changed):
    return NoiseOptions(out=out, seeds=2, quick=True, **{"sizes": TINY, "processes": 1, **changed})


def test_the_command_writes_tables_and_a_page(done, monkeypatch, capsys):
    settings = rows_of(done)
    assert len(settings) == 3 * len(TINY.settings)
    assert {row["judge"] for row in settings} == {"own", "sim_eval", "human"}
    claims = read_table(done / "claims.csv")
    assert {"rest drop", "rest peak", "slope of alpha", "slope of beta", "doubled drop"} <= set(claims.claim)
    curves = read_table(done / "curves.csv")
    assert (curves[curves.n > 1].band_low <= curves[curves.n > 1].gold).all()
    made = page(done)
    assert made.tables["predictions"].rows
    assert set(made.figures) == {"curves", "information", "dials"}
    faults = read_table(done / "dials.csv")
    assert {*faults[faults.judge == "own"].kind} == {*KINDS}
    assert {*read_table(done / "methods.csv").kind} == {"ppo", "dpo", ONCE}
    before = {file: file.read_bytes() for file in done.rglob("*.csv")}
    for name in ("draw_pairs", "run_setting", "run_method"):
        monkeypatch.setattr(noise, name, lambda *_: pytest.fail("a cell runs again"))
    assert run(options(done)) == 0
    assert {file: file.read_bytes() for file in done.rglob("*.csv")} == before
    assert "Quick form, no result" in capsys.readouterr().out


def test_a_seed_shares_pairs_and_flips_and_makes_as_many_updates(tmp_path):
    plan = Plan(tmp_path, 0, TINY)
    draw_pairs(plan, lambda update: None)
    few, many = plan.labelled(Setting(16, 0.0)), plan.labelled(Setting(64, 0.0))
    assert few == many[: len(few)]
    batch = [each.instruction for each in many], *zip(*(each.responses for each in many), strict=True)
    noised = [plan.annotator(Setting(64, flip)).judge(*batch).details["noised"] for flip in (0.25, 0.35)]
    assert (noised[0] <= noised[1]).all()
    clean = {key_of(each): each.preference for each in many}
    changed = [key_of(each) for each in plan.labelled(Setting(64, 0.25)) if clean[key_of(each)] != each.preference]
    assert 8 <= len(changed) <= 24  # a quarter
    other = replace(plan, seed=1)
    draw_pairs(other, lambda update: None)
    assert not {key[1] for key in clean} & {each.responses for each in other.labelled(Setting(64, 0.0))}
    full = Plan(tmp_path, 0, FULL)
    updates = [-(-labels // 32) * full.reward_model(Setting(labels, 0.0)).epochs for labels in FULL.labels]
    assert max(updates) / min(updates) < 1.03
    once = OncePlan(tmp_path, 0, FULL)
    assert {once.reward_model(setting).epochs for setting in FULL.settings} == {1}
    assert not {*map(once.cell, FULL.settings)} & {*map(full.cell, FULL.settings)}


def made_up(alpha, beta, *, seeds=10, prompts=40, noise=0.02, seed=0):
    """Curves with Gao's form and noise of seeds and instructions: `alpha` and `beta` are functions of a setting."""
    rng, curves = np.random.default_rng(seed), {}
    people = rng.normal(0, 0.2, (1, prompts, 1))
    for setting in FULL.settings:
        gold = np.sqrt(KL) * (alpha(setting) - beta(setting) * np.sqrt(KL))
        gold = gold * (1 + people) + noise * np.sqrt(KL) * rng.normal(size=(seeds, 1, 1))
        gold = gold + noise * rng.normal(size=gold.shape)
        curves["own", "reward model", setting.labels, setting.flip] = Curve(NS, gold, gold[:, 0], KL, np.zeros(seeds))
    return curves


def faulty(lifts=0.1, costs=0.2):
    """Curves by faults: four times the labels lift each by `lifts`, tastes cost `costs` more than flips do."""
    curves = {}
    for kind in KINDS:
        for size in (2000, 8000):
            [curve] = [
                each
                for key, each in made_up(lambda setting: 0.6, lambda setting: 0.05).items()
                if key[2:] == (500, 0.0)
            ]
            top = lifts * (size == 8000) - costs * kind.endswith("_bias")
            curves["own", kind, size, 0.0] = replace(curve, gold=curve.gold + top * (KL > 0))
    return curves


def by_ppo():
    """Those of the most labels."""
    return {key: curve for key, curve in faulty().items() if key[2] == 8000}


def trained():
    """Curves by PPO and DPO in which information is all."""
    made = made_up(by_information, lambda setting: 0.15)
    keys = [key for key in made if key[2] in (500, 1000, 2000) and key[3] == 0]
    keys += [(*key[:2], 4 * key[2], 0.25) for key in keys]
    return {("own", method, *key[2:]): made[key] for method in ("ppo", "dpo", ONCE) for key in keys}


def by_information(setting):
    return 0.3 + 0.1 * math.log2(setting.effective / 20)


def claim_of(rows, claim, labels=0):
    return next(row for row in rows if (row["claim"], row["labels"]) == (claim, labels))


def test_scarcity_alone_leaves_nothing_to_flips():
    rows = all_claims(made_up(by_information, lambda setting: 0.15), {}, {}, {})
    rest = claim_of(rows, "rest peak")
    assert abs(rest["mean"]) < 0.01  # what is left of the curvature
    assert rest["within"] < 0.05
    assert claim_of(rows, "doubled peak")["holm"]
    told = {(each.claim, each.at[0]): outcome for each, _, outcome in outcomes(pd.DataFrame(rows))}
    assert told["matched peak", 2000] == told["rest peak", 0] == told["doubled peak", 0] == "held"
    assert told["slope of alpha", 2000] == "held"


def test_what_flips_do_beyond_scarcity_is_found():
    rows = all_claims(
        made_up(lambda setting: by_information(setting) - 2 * setting.flip, lambda setting: 0.15), {}, {}, {}
    )
    assert claim_of(rows, "rest peak")["holm"]
    assert claim_of(rows, "rest peak")["mean"] < -0.05
    told = {(each.claim, each.at[0]): outcome for each, _, outcome in outcomes(pd.DataFrame(rows))}
    assert told["rest peak", 0] == told["matched peak", 2000] == "failed"


def test_gaos_parameters_are_those_that_made_the_curve():
    curves = made_up(lambda setting: 1 - setting.flip, lambda setting: 0.3, noise=0)
    for (_, _, _, flip), curve in curves.items():
        found = gao(curve)
        scale = curve.gold[..., -1] / (np.sqrt(KL[-1]) * (1 - flip - 0.3 * np.sqrt(KL[-1])))  # of each instruction
        np.testing.assert_allclose(found, [(1 - flip) * scale, 0.3 * scale])
    slope = claim_of(all_claims(curves, {}, {}, {}), "slope of alpha", 500)
    assert slope["mean"] == pytest.approx(-0.1, abs=0.02)


def test_simultaneous_bands_hold_whole_curves():
    truth, held, pointwise, num = np.sqrt(KL) * (1 - 0.3 * np.sqrt(KL)), 0, 0, 150
    for seed in range(num):
        rng = np.random.default_rng(seed)
        walk = [0.3 * rng.normal(size=(size, len(NS))).cumsum(axis=1) for size in (12, 60)]
        gold = truth + (walk[0][:, None] + walk[1][None]) * np.minimum(np.arange(len(NS)), 1)
        curve = Curve(NS, gold, gold[:, 0], KL, np.zeros(12))
        low, high = bands(curve, seed)
        inside = (low <= truth) & (truth <= high)
        held, pointwise = held + inside.all(), pointwise + inside[-1]
    assert 0.9 <= held / num <= 1  # 95 % nominal, of 12 seeds
    assert pointwise >= held


def test_predictions_name_claims_that_the_full_study_makes():
    rows = all_claims(made_up(by_information, lambda setting: 0.15), faulty(), trained(), by_ppo())
    assert len(outcomes(pd.DataFrame(rows))) == len(PREDICTED)


def test_gold_of_one_sample_is_whoever_chooses(done):
    files = [file for file in (done / "cells").glob("*labels*.json") if not {"ppo", "dpo"} & {*file.stem.split("-")}]
    stored = [json.loads(file.read_text()) for file in sorted(files)]
    cells = [row for each in stored for row in each["rows"]]
    first = {(row["judge"], row["seed"]): [] for row in cells}
    for row in cells:
        first[row["judge"], row["seed"]].append(unpack(row["gold"], len(row["n"]))[:, 0])
    for tables in first.values():
        for table in tables[1:]:
            np.testing.assert_allclose(table, tables[0], atol=1e-5)
    curves = tables_of(cells, unit=1.0)
    assert {curve.gold.shape for curve in curves.values()} == {(2, 4, 4)}


def test_claims_of_faults_are_what_the_curves_say():
    rows = {(row["claim"], row["kind"], row["labels"]): row["mean"] for row in dial_claims(faulty(), by_ppo())}
    assert [rows["lift", kind, 0] for kind in (CLEAN, "list_bias")] == pytest.approx([0.1, 0.1])
    assert [rows["cost peak", "length_bias", 2000], rows["cost end", "list_bias", 8000]] == pytest.approx([0.2, 0.2])
    assert rows["cost end", "temperature", 8000] == pytest.approx(0)
    assert dial_claims({}, {}) == []


def test_faults_leave_equal_agreement_and_share_what_they_should(tmp_path):
    sizes = replace(TINY, labels=(400,))
    draw_pairs(DialPlan(tmp_path, 0, sizes), lambda update: None)
    plans = {kind: DialPlan(tmp_path, 0, sizes, kind) for kind in KINDS}
    for kind, plan in plans.items():
        assert plan.fault.agreement == pytest.approx(1.0 if kind == CLEAN else AGREEMENT, abs=0.005), kind
    assert plans["temperature"].fault.flip < 0.02 < plans["list_bias"].fault.flip
    clean, noisy = (plans[kind].labelled(Setting(400, 0.0)) for kind in (CLEAN, "instruction_noise"))
    assert len({key_of(each)[0] for each in clean}) <= 400 / 3  # several pairs of an instruction
    right = {}
    for true, said in zip(clean, noisy, strict=True):
        right.setdefault(str(true.instruction), []).append(true.preference == said.preference)
    assert np.mean([all(each) for each in right.values() if len(each) == 4]) > 1.2 * AGREEMENT**4
