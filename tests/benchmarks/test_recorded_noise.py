"""The study of noise on recorded text: its command on a small folder, what is held out, and the real judgements."""

import json
import os
import time

import numpy as np
import pytest
from recorded_folder import MODELS, NUM, make_folder

from alpacafarm_env.benchmarks.harness.labels import Setting
from alpacafarm_env.benchmarks.harness.page import read_table
from alpacafarm_env.benchmarks.harness.stored import pack, unpack
from alpacafarm_env.benchmarks.recorded_noise.__main__ import NAME, RecordedNoiseOptions, run
from alpacafarm_env.benchmarks.recorded_noise.page import page
from alpacafarm_env.benchmarks.recorded_noise.runs import (
    Prepared,
    curves,
    numbers_for,
    prepare,
)
from alpacafarm_env.benchmarks.surrogates.scarcity import claims, corrected, tables_of
from alpacafarm_env.data.load import recorded_dataset
from alpacafarm_env.errors import DataError

pytest.importorskip("sklearn", reason="the study needs scikit-learn, pip install 'alpacafarm-env[recorded]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("recorded") / "data")


@pytest.fixture(scope="module")
def prepared(folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("prepared") / "features.npz"
    prepare(recorded_dataset(str(folder)), "preferences_claude", None, file)
    return Prepared.read(file)


def options(folder, out, **more):
    return RecordedNoiseOptions(data=str(folder), out=out, quick=True, **{"labels": (20, 80), "seeds": 2, **more})


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "one"
    assert run(options(folder, out, processes=1)) == 0
    return out


def test_the_command_writes_tables_figures_and_page(finished, capsys):
    table, found = read_table(finished / "table.csv"), read_table(finished / "claims.csv")
    assert len(table) == 2 * 2 * 2 * 4  # judges, kinds, sizes, flips
    named = {f"{way} {measure}" for way in ("matched", "doubled") for measure in ("drop", "peak")}
    assert set(found.claim) == {"slope of the drop", *named}
    assert (table.drop_low <= table["drop"]).all()
    assert (finished / "information.png").read_bytes().startswith(b"\x89PNG")
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert manifest["facts"]["num_models"] == MODELS
    assert manifest["facts"]["num_verdicts"] == MODELS * NUM - MODELS
    assert page(finished).findings == manifest["facts"]["findings"]


def test_a_folder_without_a_second_judge_has_one_gold(tmp_path):
    folder = make_folder(tmp_path / "data", other=False)
    assert run(options(folder, tmp_path / "out", labels=(20,), seeds=1, processes=1)) == 0
    assert set(read_table(tmp_path / "out" / "table.csv").judge) == {"own"}


@pytest.mark.parametrize("labels", [(80, 4_000), ()])
def test_more_labels_than_there_are_are_refused(folder, tmp_path, labels):
    with pytest.raises(DataError, match="at most"):
        run(RecordedNoiseOptions(data=str(folder), out=tmp_path, quick=True, labels=labels))


def test_what_is_tested_is_never_trained_on(prepared):
    tested = np.zeros(prepared.credits.shape)
    for part in prepared.parts:
        models, asked = part.pairs.T
        assert not (prepared.halves[models] == part.half).any()
        assert not part.asked[asked].any()
        assert np.isin(prepared.credits[models, asked], (0, 1)).all()
        tested[np.ix_(prepared.halves == part.half, part.asked)] += 1
    assert (tested == 1).all()


def test_the_second_judge_judges_models_that_were_held_out(prepared):
    assert sorted(prepared.trained_half.tolist()).count(-1) == 3
    held = [prepared.candidates("other", half)[1] for half in (0, 1)]
    assert [len(each) for each in held] == [3 + (prepared.trained_half == half).sum() for half in (0, 1)]
    assert sum(map(len, held)) == 3 + 3 + 3  # who was never trained on stands in both halves, who was in one


def test_a_curve_begins_at_the_uniform_choice(prepared):
    rows = {row["judge"]: row for row in curves(prepared, "linear", Setting(80, 0.25), 0)}
    gold = unpack(rows["own"]["gold"], len(rows["own"]["n"]))
    uniform = [np.nanmean(prepared.credits[prepared.halves == half], axis=0) for half in (0, 1)]
    np.testing.assert_allclose(gold[:, 0], np.mean(uniform, axis=0), atol=1e-6)
    assert rows["own"]["kl"][0] == pytest.approx(0)
    assert np.all(np.diff(rows["own"]["proxy"]) > 0)
    assert np.all(np.diff(rows["own"]["kl"]) > 0)


def test_curves_end_at_the_last_candidate():
    assert numbers_for(4) == [1, 2, 3, 4]
    assert numbers_for(7)[-1] == 7
    assert numbers_for(20)[-1] == 19


def rows_with_a_fall(rng, seed, size):
    """Cells' rows, by each of two flips, of curves that fall by ten points for every share of a half."""
    shape = np.array([0.5, 0.7, 0.7])
    for flip in (0.0, 0.25, 0.35):
        gold = shape - [0, 0, flip / 5] + rng.normal(0, 0.1, (size, 3))
        kind = {"judge": "own", "kind": "linear", "seed": seed, "labels": 100, "flip": flip}
        yield kind | {"n": [1, 2, 3], "gold": pack(gold), "proxy": [0, 1, 2], "kl": [0, 1, 2], "accuracy": 0.5}


def test_the_slope_of_a_planted_fall_is_found():
    rng = np.random.default_rng(0)
    rows = [row for seed in range(8) for row in rows_with_a_fall(rng, seed, 200)]
    found = {row["claim"]: row for row in corrected(claims(tables_of(rows)))}["slope of the drop"]
    assert found["low"] < 2 < found["high"]  # a fifth of a share is two points for ten points of flips
    assert found["holm"]


@pytest.mark.data
def test_the_quick_study_runs_on_real_judgements(tmp_path):
    start = time.perf_counter()
    command = RecordedNoiseOptions.parse(["--quick", "--data", os.environ["ALPACAFARM_DATA"], "--out", str(tmp_path)])
    assert run(command) == 0
    assert time.perf_counter() - start < 90
    table = read_table(tmp_path / "table.csv").set_index(["judge", "kind", "labels", "flip"])
    for kind in ("linear", "trees"):
        assert table.peak[("own", kind, 1000, 0.0)] > table.peak[("own", kind, 1000, 0.45)]
        assert table.accuracy[("own", kind, 1000, 0.0)] > 80
    assert NAME in str(json.loads((tmp_path / "manifest.json").read_text())["name"])
