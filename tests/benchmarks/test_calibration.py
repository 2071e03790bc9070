"""The calibration table: its definitions on votes counted by hand, and the command on a small folder of pairs."""

import csv
import json

import numpy as np
import pytest

from alpacafarm_env.benchmarks import calibration
from alpacafarm_env.benchmarks.calibration import (
    COLUMNS,
    MEANINGS,
    TARGETS,
    CalibrationOptions,
    Pairs,
    Target,
    agreement,
    has_list,
    main,
    majority,
    self_agreement,
)
from alpacafarm_env.errors import DataError
from alpacafarm_env.sandbox import tasks, writers
from alpacafarm_env.sandbox.dataset import write_rows
from alpacafarm_env.seeding import keyed_rng

VOTES = np.array([[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 1, 0]], dtype=np.float64)
"""Four opinions on four pairs: unanimous for b, even, three to one for a, even."""


def test_majority_of_all_votes():
    assert majority(VOTES).tolist() == [1, 0, -1, 0]


def test_agreement_with_a_side_counts_an_even_vote_half():
    assert agreement(VOTES, np.array([1.0, 0, -1, 1])).tolist() == [1, 0.5, 0.75, 0.5]


def test_each_opinion_is_compared_with_the_majority_of_the_others():
    # Even vote of four: whoever is left out, two of the other three are against him.
    assert self_agreement(VOTES).tolist() == [1, 0, 0.75, 0]


def test_of_two_opinions_each_is_the_others_majority():
    assert self_agreement(VOTES[:2]).tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("response", "expected"),
    [("- oats\n- hay", True), ("Sure!\n- oats", True), ("1. oats", True), ("Oats - and hay.", False), ("", False)],
)
def test_a_list_is_a_line_that_starts_with_a_bullet_or_a_number(response, expected):
    assert has_list(response) is expected


def test_a_target_holds_within_its_tolerance():
    assert Target(0.66, 0.03).holds(0.685)
    assert not Target(0.66, 0.03).holds(0.70)
    assert not Target(0.66, 0.03).holds(0.62)
    assert Target(0.20, 0.05, upper_bound=True).holds(0.02)
    assert not Target(0.20, 0.05, upper_bound=True).holds(0.26)


def test_longer_and_listed_point_at_the_response_that_is():
    pairs = Pairs(("x",) * 4, ("- oats", "oats, hay and straw", "abc", "- a"), ("oats", "hay", "abcd", "- b"), 2)
    assert pairs.listed.tolist() == [-1, 0, 0, 0]
    assert pairs.longer.tolist() == [0, -1, 0, 0]


def test_pairs_of_another_world_are_refused():
    with pytest.raises(DataError, match=r"pair 0: expected a verdict of 'human' for each pair, got none for 'Why\?'"):
        _ = Pairs(("Why?",), ("a",), ("b",), 2).human_majority


def test_one_opinion_cannot_be_compared():
    with pytest.raises(ValueError, match="--seeds: expected 2 or more"):
        CalibrationOptions(seeds=1)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """A folder with 150 instructions and two responses of the crowd to each, the last pair equal."""
    folder, rng = tmp_path_factory.mktemp("assets"), keyed_rng(0, "test calibration")
    drawn = [tasks.draw(rng, tasks.TEMPLATES[k % len(tasks.TEMPLATES)]) for k in range(150)]
    texts = [f"{instruction}\n\n{given}" if given else instruction for instruction, given in drawn]
    outputs = [[writers.write(writers.CROWD, text, rng) for _ in range(2)] for text in texts]
    outputs[-1][1] = outputs[-1][0]
    write_rows(folder / "data" / "preference.jsonl.gz", [{"instruction": x, "input": y} for x, y in drawn])
    write_rows(folder / "data" / "pairs.jsonl.gz", [{"output_1": a, "output_2": b} for a, b in outputs])
    return folder


def run(assets, out):
    return main(["--data", str(assets), "--out", str(out), "--seeds", "3"])


def test_the_command_writes_every_figure_with_interval_and_says_what_is_outside(assets, tmp_path, capsys):
    assert run(assets, tmp_path) == 0
    with (tmp_path / "table.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    keys = {(row["judge"], row["figure"]) for row in rows}
    assert set(TARGETS) < keys
    assert {judge for judge, _ in keys} == set(MEANINGS)
    for row in rows:
        assert 0 <= float(row["low"]) <= float(row["value"]) <= float(row["high"]) <= 1
        target = TARGETS.get((row["judge"], row["figure"]))
        assert row["within"] == ("" if target is None else str(target.holds(float(row["value"]))))
        assert int(row["n"]) <= 149
    by_key = {(row["judge"], row["figure"]): float(row["value"]) for row in rows}
    assert by_key["human", "agreement"] + by_key["human", "variance"] == pytest.approx(1)
    # Flips make the pool's opinions differ more, and one annotator differs from itself less than a pool does.
    assert by_key["sim_ann", "variance"] > by_key["sim_eval", "variance"] > by_key["sim_gpt4", "variance"]
    printed = capsys.readouterr().out
    outside = [key for key, target in TARGETS.items() if not target.holds(by_key[key])]
    assert f"{len(TARGETS) - len(outside)} of {len(TARGETS)} figures are within tolerance" in printed
    assert all(f"{judge} {figure} {by_key[judge, figure]:.3f}" in printed for judge, figure in outside)
    assert "a simulation" in printed
    assert (tmp_path / "calibration.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "manifest.json").read_text())["complete"] is True


def test_a_second_call_asks_nobody_again(assets, tmp_path, monkeypatch):
    assert run(assets, tmp_path) == 0
    table = (tmp_path / "table.csv").read_bytes()
    monkeypatch.setattr(calibration, "judge_rows", lambda *_: pytest.fail("asked again"))
    assert run(assets, tmp_path) == 0
    assert (tmp_path / "table.csv").read_bytes() == table


def test_a_folder_without_pairs_ends_with_status_2(tmp_path, capsys):
    assert run(tmp_path / "nowhere", tmp_path / "out") == 2
    assert "preference.jsonl.gz" in capsys.readouterr().err
