"""The study of methods on one axis: its command in small, equal samples, and claims on curves that are made up."""

import numpy as np
import pytest
from written import rows_of

from alpacafarm_env.benchmarks.experiment.faults import CLEAN
from alpacafarm_env.benchmarks.gold_axis import __main__ as gold_axis
from alpacafarm_env.benchmarks.gold_axis.__main__ import AxisOptions, run
from alpacafarm_env.benchmarks.gold_axis.analysis import Track, claims, marks, measures, method_rows, tracks_of
from alpacafarm_env.benchmarks.gold_axis.page import page
from alpacafarm_env.benchmarks.gold_axis.runs import LABELLINGS, METHODS, AxisSizes, TrainingSizes
from alpacafarm_env.benchmarks.harness.page import read_table
from alpacafarm_env.benchmarks.harness.stored import pack
from alpacafarm_env.errors import UnknownNameError
from alpacafarm_env.monitors import read_run, signals

SMALL = TrainingSizes(num_eval=4, steps=(0, 1, 2), rollouts=16)
TINY = AxisSizes(labels=(48,), num_prompts=4, num_samples=8, num_val=6, training=SMALL)
FLIPS, LENGTH = list(LABELLINGS)[1:]


def options(out, *methods, **changed):
    return AxisOptions(out=out, quick=True, methods=methods, **{"sizes": TINY, "processes": 1, "seeds": 2, **changed})


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a study in small: of PPO, one of the group methods and one that learns from labels."""
    out = tmp_path_factory.mktemp("axis")
    assert run(options(out, "best_of_n", "ppo", "grpo", "kto")) == 0
    return out


def test_the_command_writes_tables_and_a_page(done, monkeypatch):
    rows = rows_of(done)
    assert len(rows) == 4 * 3 * 3  # methods, labellings, judges
    curves = read_table(done / "curves.csv")
    assert {*curves.kind} == {*LABELLINGS}
    assert set(page(done).figures) == {"kl", "proxy"}
    before = {file: file.read_bytes() for file in done.rglob("*.csv")}
    monkeypatch.setattr(gold_axis, "draw_pairs", lambda *_: pytest.fail("a cell runs again"))
    assert run(options(done, "best_of_n", "ppo", "grpo", "kto")) == 0
    assert {file: file.read_bytes() for file in done.rglob("*.csv")} == before
    with pytest.raises(UnknownNameError, match="grpo"):
        run(options(done, "gpro"))


def test_runs_keep_what_monitors_read(done):
    folders = sorted(path.parent for path in (done / "runs").rglob("metrics.jsonl") if "grpo" in path.parent.name)
    assert len(folders) == 6
    for folder in folders:
        assert not np.isnan(signals(read_run(folder))["repetition"]).any()


@pytest.mark.slow
def test_every_method_runs(tmp_path):
    assert run(options(tmp_path, *METHODS, seeds=1)) == 0
    assert {row["method"] for row in rows_of(tmp_path)} == {*METHODS}


def test_methods_draw_equally_many_samples():
    full = AxisSizes().training
    ends = {
        name: full.samples(name, full.places(name))[-1] for name in METHODS if name not in ("best_of_n", "kto", "dpo")
    }
    assert max(ends.values()) == ends["ppo"] == 5_120
    assert min(ends.values()) > 0.98 * ends["ppo"]
    assert full.samples("dpo", full.places("dpo")) == [0] * len(full.steps)
    assert dict(full.changed("grpo"))["total_steps"] == full.steps[-1]


def made_up(alpha, beta, *, speed=1.0, seeds=6, prompts=30, noise=0.02, seed=0):
    """A method whose gold is d (alpha - beta d) at d = sqrt(KL), and whose proxy grows with d."""
    rng, steps = np.random.default_rng(seed), np.arange(0, 13)
    distance = speed * steps * 0.25 * (1 + rng.normal(0, 0.03, (seeds, 1)))
    level, taste = rng.normal(0, 1, (prompts, 1)), rng.normal(0, noise, (seeds, prompts, 1))
    gold = level + (distance * (alpha - beta * distance))[:, None] + taste * (distance > 0)[:, None]
    return Track([*steps.tolist()], [256 * int(step) for step in steps], distance**2, distance, {"own": gold})


def tracks(**methods):
    return {(CLEAN, name): track for name, track in methods.items()}


def test_peak_and_fall_are_those_of_the_curve():
    track = made_up(1.2, 0.3, noise=0.0)  # d runs to 3, the peak is at 2 with 1.2, the end has .9
    found = measures(track, track.reach(track.distance), 1.0)
    assert found["peak"].mean() == pytest.approx(1.2, abs=0.02)
    assert found["drop"].mean() == pytest.approx(0.3, abs=0.05)
    assert found["fall_at_kl"].mean() == pytest.approx(0.3, abs=0.05)
    assert found["gold_at_proxy"].mean() == pytest.approx(0.9, abs=0.01)


def test_a_slow_method_is_compared_where_it_has_been():
    """At equal KL a method that only goes slower is no better; to the runs' ends it seems so."""
    fast = {name: made_up(1.2, 0.3, seed=number) for number, name in enumerate(("ppo", "grpo", "dapo"))}
    both = tracks(**fast, rloo=made_up(1.2, 0.3, speed=0.8, seed=4), kto=made_up(1.2, 0.3, speed=0.1))
    rows = {(row["claim"], row["method"]): row for row in claims(both)}
    assert not rows["fall_at_kl", "rloo"]["holm"]
    assert ("fall_at_kl", "kto") not in rows  # it gets nowhere near
    distance, _ = marks(both, CLEAN)
    assert 2.2 < distance < 2.5
    told = {row["method"]: row for row in method_rows(both)}
    assert told["rloo"]["drop"] < told["ppo"]["drop"] - 0.1
    assert np.isnan(told["kto"]["fall_at_kl"])


def test_a_difference_is_clear_and_paired():
    both = tracks(ppo=made_up(1.2, 0.3), grpo=made_up(1.2, 0.36), dapo=made_up(1.2, 0.3, seed=5))
    rows = {(row["claim"], row["method"]): row for row in claims(both)}
    assert rows["peak", "grpo"]["holm"]
    assert rows["peak", "grpo"]["mean"] < -0.1
    assert rows["fall_at_kl", "grpo"]["mean"] > 0
    assert not rows["peak", "dapo"]["holm"]


def test_what_length_costs_beyond_flips():
    both = {(FLIPS, "dpo"): made_up(1.2, 0.3), (LENGTH, "dpo"): made_up(0.8, 0.3)}
    (row,) = claims(both)
    assert (row["claim"], row["method"], row["holm"]) == ("cost of length", "dpo", True)
    assert row["mean"] > 0.5


def test_rows_of_cells_are_read_by_seed():
    found = tracks_of([
        {"kind": CLEAN, "method": "ppo", "judge": "own", "seed": seed, "n": [0, 1], "samples": [0, 16],
         "kl": [0.0, float(seed)], "proxy": [0.0, 1.0], "gold": pack(np.array([[0.0, seed]]))}
        for seed in (1, 0)
    ])  # fmt: skip
    np.testing.assert_array_equal(found[CLEAN, "ppo"].kl[:, 1], [0, 1])
    np.testing.assert_array_equal(found[CLEAN, "ppo"].golds["own"][:, 0, 1], [0, 1])
