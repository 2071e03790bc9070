"""Votes counted by hand, rows and their report, and the command on a small folder of pairs."""

import numpy as np
import pytest
import written
from annotator_worlds import Fake, by_key, make_assets, run, shut_off

from alpacafarm_env.annotators import analysis
from alpacafarm_env.annotators.analysis import COST, Pairs, ask, figures, has_list
from alpacafarm_env.benchmarks.annotators import command as annotators
from alpacafarm_env.benchmarks.annotators import report
from alpacafarm_env.benchmarks.annotators import sandbox as annotator_sandbox
from alpacafarm_env.benchmarks.annotators.report import MEMBERS
from alpacafarm_env.benchmarks.annotators.rows import SPENT, TARGETS, Target, make_row, rows_of
from alpacafarm_env.benchmarks.harness.estimates import frame_of
from alpacafarm_env.benchmarks.harness.report import text_table
from alpacafarm_env.errors import DataError
from alpacafarm_env.oracles.base import Verdicts
from alpacafarm_env.sandbox import judge
from alpacafarm_env.statistics import wilson

VOTES = np.array([[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 1, 0]], dtype=np.float64)
"""Four opinions on four pairs: unanimous for b, even, three to one for a, even."""
NAN = np.nan
PUBLISHED = {(judge, figure): target for judge, own in TARGETS.items() for figure, target in own.items()}


def test_votes_counted_by_hand():
    assert analysis.majority(VOTES).tolist() == [1, 0, -1, 0]
    assert analysis.agreement(VOTES, np.array([1.0, 0, -1, 1])).tolist() == [1, 0.5, 0.75, 0.5]
    # Even vote of four: whoever is left out, two of the other three are against him.
    assert analysis.self_agreement(VOTES).tolist() == [1, 0, 0.75, 0]
    assert analysis.self_agreement(VOTES[:2]).tolist() == [1, 1, 1, 0]
    assert analysis.disagreement(VOTES).tolist() == pytest.approx([0, 4 / 6, 3 / 6, 4 / 6])
    assert analysis.bias(VOTES, np.array([1.0, 1, 1, 0])).tolist() == [0, 0.5, 1, 0.5]
    assert analysis.bias(VOTES, np.array([-1.0, -1, -1, -1])).tolist() == [1, 0.5, 0, 0.5]


def test_missing_verdicts_take_no_part():
    votes = np.array([[1, NAN, NAN], [1, 1, NAN], [0, NAN, NAN]])
    np.testing.assert_equal(analysis.majority(votes), [1, 1, NAN])
    np.testing.assert_equal(analysis.agreement(votes, np.ones(3)), [2 / 3, 1, NAN])
    np.testing.assert_equal(analysis.self_agreement(votes), [1 / 3, NAN, NAN])  # even, even, the last against both
    np.testing.assert_allclose(analysis.disagreement(votes), [2 / 3, NAN, NAN])
    np.testing.assert_equal(analysis.bias(votes, np.ones(3)), [0, 0, NAN])


def test_a_tie_is_on_both_sides_by_half():
    votes = np.array([[0.5], [1.0]])
    assert analysis.agreement(votes, np.ones(1)).tolist() == [0.75]
    assert analysis.majority(votes).tolist() == [1]
    assert analysis.disagreement(votes).tolist() == [1]


@pytest.mark.parametrize(
    ("response", "expected"),
    [("- oats\n- hay", True), ("Sure!\n- oats", True), ("1. oats", True), ("Oats - and hay.", False), ("", False)],
)
def test_a_list_is_a_line_that_starts_with_a_bullet_or_a_number(response, expected):
    assert has_list(response) is expected
    assert has_list(response, published=True) is expected


def test_longer_and_listed_point_at_the_response_that_is():
    pairs = Pairs(("x",) * 4, ("- oats", "oats, hay and straw", "abc", "- a"), ("oats", "hay", "abcd", "- b"))
    assert pairs.listed.tolist() == [-1, 0, 0, 0]
    assert pairs.longer.tolist() == [0, -1, 0, 0]
    assert Pairs(pairs.instructions, pairs.a, pairs.b, published=True).longer.tolist() == [0, 0, 0, 0]


def same_pairs(num):
    return Pairs(("x",) * num, ("a",) * num, ("b",) * num)


def test_position_and_cost_of_a_judge_that_always_takes_the_first():
    opinions = ask(same_pairs(4), Fake, range(4))
    found = figures(opinions, same_pairs(4), np.ones(4))
    np.testing.assert_equal(found["prefers_first"], [NAN, 1, 1, 1])
    np.testing.assert_allclose(found[COST], [2, NAN, 2, 2])  # the stored answer was not paid for now
    np.testing.assert_equal(found["agreement"], [NAN, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(found["disagreement"], [NAN, 4 / 6, 4 / 6, 4 / 6])
    np.testing.assert_equal(figures(opinions.by("bob"), same_pairs(4), np.ones(4))["prefers_first"], [NAN, 1, NAN, 1])


class Noisy(Fake):
    """Half of its verdicts are noise; the rest is paid for, or was answered before."""

    def __init__(self, seed, num_cached):
        super().__init__(seed)
        self.num_cached = num_cached

    def judge(self, instructions, a, b):
        verdicts, n = super().judge(instructions, a, b), np.arange(len(a))
        free = (n % 2 == 1) | (n < self.num_cached)
        details = {"noised": n % 2 == 1, "cached": (n % 2 == 0) & free, "cost_usd": np.where(free, 0.0, 0.002)}
        return Verdicts(verdicts.scores, {**verdicts.details, **details})


@pytest.mark.parametrize("num_cached", [0, 6])
def test_noise_is_free_and_a_second_call_is_no_cheaper_by_it(num_cached):
    opinions = ask(same_pairs(10), lambda seed: Noisy(seed, num_cached), range(4))
    assert np.nanmean(figures(opinions, same_pairs(10), None)[COST]) == pytest.approx(1)
    assert np.nansum(opinions.cost_usd) == pytest.approx(4 * 0.002 * (10 - num_cached) / 2)


def test_a_row_averages_seeds_before_it_takes_the_interval_over_pairs():
    by_seed = [{"variance": np.array([0.0, 1, NAN])}, {"variance": np.array([1.0, 0, NAN])}]
    (row,) = rows_of("judge", by_seed, "sandbox", {"variance": Target(0.4, 0.2)})
    assert (row["value"], row["low"], row["high"], row["n"]) == (0.5, *wilson(1, 2), 2)
    assert (row["seeds"], row["seed_min"], row["seed_max"], row["within"]) == (2, 0.5, 0.5, True)
    assert rows_of("judge", [{"variance": np.array([NAN])}], "sandbox") == []


@pytest.mark.parametrize(("share", "num"), [(1, 4), (0, 29), (0.5, 29), (0, 400), (1, 400)])
def test_few_pairs_or_one_verdict_of_all_have_the_interval_of_wilson(share, num):
    values = np.arange(num) < round(share * num)
    (row,) = rows_of("judge", [{"agreement": values.astype(float)}], "live")
    assert (row["value"], row["low"], row["high"]) == (values.mean(), *wilson(values.sum(), num))


def test_a_target_holds_within_its_tolerance():
    assert [Target(0.66, 0.03).holds(value) for value in (0.685, 0.70, 0.62)] == [True, False, False]
    assert [Target(0.20, 0.05, upper_bound=True).holds(value) for value in (0.02, 0.26)] == [True, False]
    assert Target(300.0).holds(0) is None


def test_pairs_of_another_world_are_refused():
    with pytest.raises(DataError, match="Why"):
        ask(Pairs(("Why?",), ("a",), ("b",)), lambda seed: judge("human", seed), range(2))


def test_fewer_than_two_pairs_are_refused():
    with pytest.raises(ValueError, match="--pairs: expected"):
        annotators.AnnotatorsOptions(pairs=1)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def offline(monkeypatch, tmp_path):
    shut_off(monkeypatch, tmp_path)


@pytest.mark.usefixtures("offline")
def test_the_command_writes_every_figure_and_asks_nobody_again(assets, tmp_path, monkeypatch, capsys):
    assert run(assets, tmp_path) == 0
    rows = written.rows_of(tmp_path)
    values = {key: float(row["value"]) for key, row in by_key(rows).items()}
    assert set(PUBLISHED) < set(values)
    assert {judge for judge, _ in values} == {*annotator_sandbox.MEANINGS, *MEMBERS}
    for row in rows:
        if row["low"]:  # seeds that rank alike have no interval
            assert float(row["low"]) <= float(row["value"]) <= float(row["high"]) <= 1
        target = PUBLISHED.get((row["judge"], row["figure"]))
        if row["judge"] not in MEMBERS:
            holds = target and target.holds(float(row["value"]))
            assert row["within"] == ("" if holds is None else str(holds))
    assert values["human", "agreement"] + values["human", "variance"] == pytest.approx(1)
    # Flips make the pool's opinions differ more, and one annotator differs from itself less than a pool does.
    assert values["sim_ann", "variance"] > values["sim_eval", "variance"] > values["sim_gpt4", "variance"]
    assert values["single annotators", "variance"] == pytest.approx(np.mean([values[m, "variance"] for m in MEMBERS]))
    outside = [key for key, target in PUBLISHED.items() if target.holds(values[key]) is False]
    printed = capsys.readouterr().out
    assert all(f"{judge} {figure} {values[judge, figure]:.3f}" in printed for judge, figure in outside)
    assert (tmp_path / "annotators.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "table.csv").read_bytes()
    monkeypatch.setattr(annotators, "judge_rows", lambda *_: pytest.fail("asked again"))
    assert run(assets, tmp_path) == 0
    assert (tmp_path / "table.csv").read_bytes() == table


@pytest.mark.usefixtures("offline")
def test_seeds_ask_for_opinions_that_no_other_seed_has(assets):
    data = annotator_sandbox.Sandbox(assets / "data")
    question = annotator_sandbox.Question(annotator_sandbox.load_pairs(data), annotator_sandbox.load_contests(data))
    assert [seed for s in range(3) for seed in question.seeds(s)] == list(range(12))
    rows = {row["figure"]: row for row in annotator_sandbox.judge_rows("sim_eval", question)}
    assert rows["agreement"]["seed_min"] < rows["agreement"]["seed_max"]


@pytest.mark.usefixtures("offline")
def test_folders_without_pairs_or_judgements_end_with_status_2(assets, own_data, tmp_path, capsys):
    assert run(tmp_path / "nowhere", tmp_path / "out") == 2
    assert "preference.jsonl.gz" in capsys.readouterr().err
    assert run(assets, tmp_path / "out", "--data", str(own_data)) == 2
    assert "expected a folder with recorded judgements" in capsys.readouterr().err


def row(judge, name, value, level="sandbox", *, num=200, seeds=(), target=None):
    return make_row(judge, name, value, (max(0, value - 0.05), min(1, value + 0.05)), num, level, seeds, target)


def live(name, value, num=200):
    return row("live eval", name, value, "live", num=num, target=TARGETS["sim_eval"].get(name))


LIVE = [live("agreement", 0.66), live("variance", 0.40), live(COST, 3.0), live(SPENT, 0.5, 800)]
ALONE_ROWS = [
    row(f"live {name}", name_of, value, "live", num=num)
    for name, value, num in (("gpt4_1", 1.0, 18), ("mine", 0.5, 4))
    for name_of in ("agreement", "prefers_first", COST)
]


def findings(rows):
    return report.findings(frame_of(rows))


def test_a_live_pools_annotators_are_told_apart_from_the_pool():
    assert report.is_member(frame_of(LIVE + ALONE_ROWS)).tolist() == [False] * len(LIVE) + [True] * len(ALONE_ROWS)
    assert report.is_member(frame_of([row("gpt4_1", "agreement", 0.7), *LIVE])).tolist() == [True] + [False] * len(LIVE)


def test_one_line_for_each_annotator_says_of_how_many_pairs():
    table = report.member_table(frame_of(ALONE_ROWS))
    assert table.header == ("annotator", "agreement", "prefers_first", COST)
    assert list(table.rows) == [
        ("gpt4_1", *["1.000 (18)"] * 3),
        ("mine", *["0.500 (4)"] * 3),
    ]
    assert max(map(len, text_table(table).splitlines())) < 80


def test_the_live_sentence_counts_and_names_what_is_outside():
    said = findings(LIVE + ALONE_ROWS)
    assert said[0].startswith("Live: 1 of 2 within tolerance")
    assert "Outside: live eval variance 0.400 [0.350 to 0.450] (paper 0.26, off by 0.140, allowed 0.05)." in said[0]
    assert said[1].startswith("Live: intervals wider than the tolerance: agreement; ")  # 0.1 wide, +-0.03 and +-0.05
    assert said[2] == "Live: eval cost $0.5000 for this study ($3.00 a thousand)."
    assert findings([row("live mine", SPENT, 0.0, "live")])[0] == (
        "Live: the paper has no figures for a pool like mine."
    )


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ((0.3,), None),
        ((0.28, 0.29), "Each of the 2 seeds alone gives the same answers."),
        ((0.28, 0.35), "In some of the 2 seeds the answer is another for: sim_eval variance."),
    ],
)
def test_seeds_are_spoken_of_where_there_are_several(seeds, said):
    target = TARGETS["sim_eval"]["variance"]
    told = findings([row("sim_eval", "variance", float(np.mean(seeds)), seeds=seeds, target=target)])
    assert told[1:] == ([said] if said else [])


def test_fewer_pairs_with_a_known_order_are_explained():
    rows = [row("sim_ann", "agreement", 0.6, num=9680), row("sim_ann", "prefers_first", 0.5, num=9100)]
    assert findings(rows)[0].startswith("sim_ann prefers_first counts 9100 of 9680 pairs: on the others all")
    assert findings([rows[0], row("sim_ann", "prefers_first", 0.5, num=9680)]) == []


RECORDED = [
    row("gpt4_b1", "variance", 0.15, "recorded", target=Target(0.14)),
    row("gpt4_b1", "agreement", 0.7, "recorded"),
]


def test_the_figure_draws_every_level_with_a_published_value():
    target = TARGETS["sim_eval"]["variance"]
    sandbox = [row("sim_eval", "variance", 0.5, seeds=(0.5,), target=target)]
    rows = frame_of([*sandbox, *RECORDED, *LIVE, *ALONE_ROWS])
    above, below = report.draw(rows, "note").axes
    assert [label.get_text() for label in above.get_yticklabels()][::-1] == [
        "agreement: live eval",
        "variance: sim_eval",
        "variance: gpt4_b1 (recorded)",
        "variance: live eval",
    ]
    assert "live eval" in [text.get_text() for text in below.texts]
    assert report.drawn_levels(rows) == ["sandbox", "recorded", "live"]
