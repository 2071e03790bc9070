"""Judges: votes counted by hand, rows and the report of them, and the command on a small folder of pairs."""

import json

import numpy as np
import pytest
import written
from faulty_server import FaultyJudgeServer

from alpacafarm_env.annotators import analysis
from alpacafarm_env.annotators.analysis import COST, Pairs, ask, figures, has_list
from alpacafarm_env.benchmarks.annotators import __main__ as command
from alpacafarm_env.benchmarks.annotators import judges, report
from alpacafarm_env.benchmarks.annotators.judges import (
    MEANINGS,
    PAPERS_POOLS,
    SPENT,
    TARGETS,
    Question,
    Target,
    make_row,
    near,
    rows_of,
)
from alpacafarm_env.benchmarks.harness.estimates import frame_of
from alpacafarm_env.errors import BudgetExceededError
from alpacafarm_env.oracles.base import Verdicts
from alpacafarm_env.sandbox import SANDBOX, tasks, writers
from alpacafarm_env.sandbox.dataset import write_rows
from alpacafarm_env.seeding import keyed_rng
from alpacafarm_env.statistics import Interval, wilson

VOTES = np.array([[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 1], [1, 0, 1, 0]], dtype=np.float64)
"""Four opinions on four pairs: unanimous for b, even, three to one for a, even."""
NAN = np.nan


class Fake:
    """A judge by rule: the response shown first wins, which is a for even seeds, b for odd ones."""

    name = "fake"

    def __init__(self, seed, fails=None):
        self.seed, self.fails = seed, fails

    def compare(self, instructions, a, b):
        return self.judge(instructions, a, b).scores

    def judge(self, instructions, a, b):
        if self.fails is not None:
            raise self.fails
        size, odd = len(a), self.seed % 2
        scores = np.full(size, float(odd))
        scores[0] = np.nan
        details = {
            "annotator": np.array(["ann", "bob"], dtype=object)[np.arange(size) % 2],
            "shown_first": np.full(size, "ab"[odd]),
            "cost_usd": np.full(size, 0.002),
            "cached": np.arange(size) == 1,
        }
        return Verdicts(scores, details)


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
    values = figures(opinions, same_pairs(4), np.ones(4))
    np.testing.assert_equal(values["prefers_first"], [NAN, 1, 1, 1])
    np.testing.assert_allclose(values[COST], [2, NAN, 2, 2])  # the stored answer was not paid for now
    np.testing.assert_equal(values["agreement"], [NAN, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(values["disagreement"], [NAN, 4 / 6, 4 / 6, 4 / 6])
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
    assert near("variance", 0.10).tolerance == pytest.approx(1.96 * (0.10 * 0.90 / 648) ** 0.5)
    assert near("prefers_lists", 0.69).tolerance == 0.05  # half the interval is 0.12


def row(judge, name, value, level="sandbox", *, num=200, target=None):
    estimate = Interval(value, max(0, value - 0.05), min(1, value + 0.05), num)
    return make_row(judge, name, estimate, level, (), target)


def live(name, value, num=200):
    return row("live eval", name, value, "live", num=num, target=TARGETS["sim_eval"].get(name))


LIVE = [live("agreement", 0.66), live("variance", 0.40), live(COST, 3.0), live(SPENT, 0.5, 800)]
ALONE_ROWS = [
    row(f"live {name}", figure, value, "live", num=num)
    for name, value, num in (("gpt4_1", 1.0, 18), ("mine", 0.5, 4))
    for figure in ("agreement", "prefers_first", COST)
]


def test_one_line_for_each_annotator_says_of_how_many_pairs():
    rows = frame_of([row("gpt4_1", "agreement", 0.7), *LIVE, *ALONE_ROWS])
    assert report.is_member(rows).tolist() == [True] + [False] * len(LIVE) + [True] * len(ALONE_ROWS)
    table = report.member_table(frame_of(ALONE_ROWS))
    assert table.header == ("annotator", "agreement", "prefers_first", COST)
    assert list(table.rows) == [("gpt4_1", *["1.000 (18)"] * 3), ("mine", *["0.500 (4)"] * 3)]


def test_a_live_judge_is_counted_and_what_is_outside_named():
    texts = report.findings(frame_of(LIVE + ALONE_ROWS))
    assert "1 of 2" in texts[0]
    assert "live eval variance 0.400 [0.350 to 0.450] (paper 0.26, off by 0.140, allowed 0.03)" in texts[0]
    assert "$0.5000" in texts[1]
    assert len(report.findings(frame_of([row("live mine", SPENT, 0.0, "live")]))) == 2


def test_the_figure_draws_every_level_with_a_published_value():
    sandbox = [row("sim_eval", "variance", 0.5, target=TARGETS["sim_eval"]["variance"])]
    recorded = [row("gpt4_b1", "variance", 0.15, "recorded", target=Target(0.14))]
    above, below = report.draw(frame_of([*sandbox, *recorded, *LIVE, *ALONE_ROWS]), "note").axes
    shown = [label.get_text() for label in above.get_yticklabels()][::-1]
    assert shown == ["agreement: live eval", "variance: sim_eval", "variance: gpt4_b1", "variance: live eval"]
    assert "live eval" in [text.get_text() for text in below.texts]


def make_assets(folder):
    """A folder with 150 instructions and two responses of the crowd to each, the last pair equal, and 30 of eval."""
    rng = keyed_rng(0, "test calibration")
    drawn = [tasks.draw(rng, tasks.TEMPLATES[k % len(tasks.TEMPLATES)]) for k in range(150)]
    texts = [f"{instruction}\n\n{given}" if given else instruction for instruction, given in drawn]
    outputs = [[writers.write(writers.CROWD, text, rng) for _ in range(2)] for text in texts]
    outputs[-1][1] = outputs[-1][0]
    rows = [{"instruction": x, "input": y} for x, y in drawn]
    write_rows(folder / "data" / "preference.jsonl.gz", rows)
    write_rows(folder / "data" / "eval.jsonl.gz", rows[:30])
    write_rows(folder / "data" / "davinci003_stand_in.jsonl.gz", [{"output": a} for a, _ in outputs[:30]])
    write_rows(folder / "data" / "pairs.jsonl.gz", [{"output_1": a, "output_2": b} for a, b in outputs])
    return folder


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No recorded judgements, and a ledger of the test's own."""
    monkeypatch.delenv("ALPACAFARM_DATA", raising=False)
    monkeypatch.setenv("ALPACAFARM_LEDGER", str(tmp_path / "own.sqlite"))


@pytest.fixture
def no_sandbox(monkeypatch):
    """The sandbox's judges are not measured."""
    rows = rows_of("human", [{"agreement": np.ones(40), "variance": np.zeros(40)}], "sandbox")
    monkeypatch.setattr(command, "judge_rows", lambda judge, question: rows if judge == "human" else [])


def run(assets, out, *more):
    return command.main(["--sandbox", str(assets), "--out", str(out), "--seeds", "2", *more])


def by_key(out, level=None):
    return {(row["judge"], row["figure"]): row for row in written.rows_of(out) if level in (None, row["level"])}


def test_the_command_writes_every_figure_and_asks_nobody_again(assets, tmp_path, monkeypatch, capsys):
    assert run(assets, tmp_path) == 0
    rows = by_key(tmp_path)
    values = {key: float(row["value"]) for key, row in rows.items()}
    published = {(judge, figure): target for judge, own in TARGETS.items() for figure, target in own.items()}
    assert set(published) < set(values)
    assert {judge for judge, _ in values} == {*MEANINGS, *report.MEMBERS}
    for (judge, figure), row in rows.items():
        if row["low"]:  # seeds that rank alike have no interval
            assert float(row["low"]) <= float(row["value"]) <= float(row["high"]) <= 1
        if judge not in report.MEMBERS:
            holds = (judge, figure) in published and published[judge, figure].holds(values[judge, figure])
            assert row["within"] == (str(holds) if row["tolerance"] else "")
    assert values["human", "agreement"] + values["human", "variance"] == pytest.approx(1)
    # Flips make the pool's opinions differ more, and one annotator differs from itself less than a pool does.
    assert values["sim_ann", "variance"] > values["sim_eval", "variance"] > values["sim_gpt4", "variance"]
    alone = [values[name, "variance"] for name in report.MEMBERS]
    assert values["single annotators", "variance"] == pytest.approx(np.mean(alone))
    assert rows["sim_eval", "agreement"]["seed_min"] < rows["sim_eval", "agreement"]["seed_max"]
    outside = [key for key, target in published.items() if target.holds(values[key]) is False]
    printed = capsys.readouterr().out
    assert all(f"{judge} {figure} {values[judge, figure]:.3f}" in printed for judge, figure in outside)
    assert (tmp_path / "annotators.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "table.csv").read_bytes()
    monkeypatch.setattr(command, "judge_rows", lambda *_: pytest.fail("asked again"))
    assert run(assets, tmp_path) == 0
    assert (tmp_path / "table.csv").read_bytes() == table


def test_seeds_ask_for_opinions_that_no_other_seed_has():
    asked, pairs = [], same_pairs(2)
    for seed in range(3):
        Question(pairs, pairs).ask(lambda number: asked.append(number) or Fake(number), seed)
    assert asked == list(range(12))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--sandbox", "nowhere"), "preference.jsonl.gz"),
        (("--data", "DATA"), "recorded judgements"),
        (("--labels", "DATA/none.json"), "none.json"),
        (("--judge", '{"pool": "evl"}'), "evl"),
        (("--judge", '{"pool": "eval", "base_url": "https://example.org/v1"}'), "example.org"),
        (("--judge", '{"pool": "eval", "base_url": "http://someone:canary@127.0.0.1:9/v1"}'), "base_url"),
    ],
)
def test_faults_are_named_before_anybody_is_asked(assets, own_data, tmp_path, monkeypatch, capsys, options, why):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(command, "judge_rows", lambda *_: pytest.fail("asked"))
    assert run(assets, tmp_path / "out", *(word.replace("DATA", str(own_data)) for word in options)) == 2
    shown = capsys.readouterr().err
    assert why in shown
    assert "canary" not in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_sandbox")
def test_a_judge_of_ones_own_is_measured_or_says_why_not(assets, tmp_path, monkeypatch, capsys):
    given, fails = ("--judge", "sys:path", "--pairs", "20"), [BudgetExceededError("$1 of $1 spent")]
    monkeypatch.setattr(command, "make_own_comparer", lambda *_: None)
    monkeypatch.setattr(judges, "make_own_comparer", lambda spec, data, seed: Fake(seed, *fails))
    monkeypatch.setattr(command, "judge_settings", lambda _: "fake")
    assert run(assets, tmp_path, *given) == 1
    assert {row["level"] for row in written.rows_of(tmp_path)} == {"sandbox"}
    assert "FAILED: $1 of $1 spent" in capsys.readouterr().out
    fails.clear()
    assert run(assets, tmp_path, *given) == 0
    rows = by_key(tmp_path, "live")
    assert {judge for judge, _ in rows} == {"live fake", "live ann", "live bob"}
    values = {figure: float(row["value"]) for (judge, figure), row in rows.items() if judge == "live fake"}
    assert (values["prefers_first"], values["variance"], values["agreement"]) == (1, 1, 0.5)
    assert (values[COST], values["no_verdict"]) == (pytest.approx(2), pytest.approx(1 / 20))
    assert values["spent_usd"] == pytest.approx(4 * 19 * 0.002)
    assert int(rows["live bob", "prefers_first"]["n"]) == 10


@pytest.mark.usefixtures("no_sandbox")
@pytest.mark.parametrize(
    ("server", "why"),
    [
        ({"api_key": "right"}, "refused the key"),
        ({"faults": {"content_filter": 1.0}}, "got none for any of the pairs. The first says"),
        ({}, None),
    ],
)
def test_a_pool_behind_a_server_stands_beside_the_papers(assets, tmp_path, monkeypatch, capsys, server, why):
    monkeypatch.setenv("OPENAI_API_KEY", "canary-of-a-key")
    with FaultyJudgeServer(**server) as serving:
        spec = {"pool": "alpaca_farm", "base_url": serving.base_url, "models": "sandbox"}
        assert run(assets, tmp_path, "--judge", json.dumps(spec), "--pairs", "4" if why else "20") == (why is not None)
    shown = capsys.readouterr()
    assert "canary" not in shown.err + shown.out
    rows = by_key(tmp_path, "live")
    if why:
        assert why in shown.out
        assert not rows
        return
    pool = rows["live alpaca_farm", "agreement"]
    assert 0.5 < float(pool["value"]) < 0.9
    assert (int(pool["n"]), pool["paper"]) == (20, "0.65")
    assert float(rows["live alpaca_farm", "no_verdict"]["value"]) == 0


@pytest.mark.parametrize("name", PAPERS_POOLS)
def test_the_pools_of_the_paper_have_these_names(name):
    spec = {"pool": name.partition("+")[0], "base_url": "http://127.0.0.1:9/v1"}
    assert judges.make_own_comparer(json.dumps(spec), SANDBOX).name == name


@pytest.mark.usefixtures("no_sandbox")
def test_people_have_the_figures_of_the_simulated_judges(assets, tmp_path, capsys):
    labels = [  # Ann always takes the first, as the judge of the pairs does; Bob the first of the first 30
        {"instruction": f"Ask {n}", "output_1": "a", "output_2": "b", "preference": preference, "annotator": name}
        | {"raw_preference": 1 + preference, "judge_preference": 1, "judge": "gpt4", "shown_first": "output_1"}
        for n in range(40)
        for name, preference in (("Ann", 1), ("Bob", 1 + (n >= 30)))
    ]
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    assert run(assets, tmp_path / "out", "--labels", str(tmp_path / "labels.json")) == 0
    rows = by_key(tmp_path / "out", "people")
    values = {key: float(row["value"]) for key, row in rows.items()}
    assert values["people", "agreement"] == 0.75
    assert values["people", "prefers_first"] == 0.875
    assert values["their pairs' judge gpt4", "agreement"] == 0.875  # ten even votes count half
    assert values["people Bob", "agreement_with_judge"] == 0.75
    assert values["people Ann", "agreement_with_judge"] == 1
    assert rows["people", "variance"]["paper"] == "0.35"
    assert all(row["within"] == "" for row in rows.values())
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if "(40)" in line] == ["Ann", "Bob"]
