"""The protocol: its statistics, held-out instructions, answers, recorded leaderboards, and the command."""

import gzip
import json
import math
import shutil
from itertools import combinations, islice

import numpy as np
import pytest
from scipy import stats
from written import rows_of

from alpacafarm_env.benchmarks.experiment.reward_models import fresh_instructions
from alpacafarm_env.benchmarks.harness.estimates import frame_of
from alpacafarm_env.benchmarks.protocol import __main__ as protocol
from alpacafarm_env.benchmarks.protocol import analysis, answers, levels, report
from alpacafarm_env.benchmarks.protocol.analysis import make_row, placed, rate_row
from alpacafarm_env.benchmarks.protocol.answers import EVAL, FRESH, LIVE, distances, properties, questions, shares
from alpacafarm_env.data.load import recorded_dataset as load
from alpacafarm_env.data.recorded import reference_digest
from alpacafarm_env.errors import DataError
from alpacafarm_env.oracles import make_oracle
from alpacafarm_env.sandbox import SANDBOX, tasks
from alpacafarm_env.sandbox.dataset import EVAL_SOURCES
from alpacafarm_env.seeding import keyed_rng

NAN = math.nan


def credits_of(rates, num, seed=0, seeds=1):
    rng = np.random.default_rng(seed)
    return {
        f"g{place}": {k: (rng.random(num) < rate).astype(float) for k in range(seeds)}
        for place, rate in enumerate(rates)
    }


def select(rows, figure, subject=analysis.ALL):
    return [row for row in rows if (row["figure"], row["subject"]) == (figure, subject)]


def test_a_win_rate_has_the_t_interval_of_scipy():
    scored = np.array([1.0, 0, 0.5, 1, 1, 0])
    row = analysis.rate_row("m", "all", np.append(scored, NAN))
    low, high = stats.t.interval(0.95, 5, scored.mean(), stats.sem(scored))
    assert (row["value"], row["n"]) == (pytest.approx(100 * scored.mean()), 6)
    assert row["standard_error"] == pytest.approx(100 * stats.sem(scored))
    assert (row["low"], row["high"]) == pytest.approx((max(0, 100 * low), min(100, 100 * high)))


def test_win_rates_and_agreement_of_sources_by_hand():
    verdicts = {"one": [1, 1, 1, 1, 0, 0, 0, 1], "two": [1, 0, 0, 1, 0, 1, 0, 1], "three": [0, 0, 0, 1, 1, 1, 1, 0]}
    credits = {name: {0: np.array(row, dtype=float)} for name, row in verdicts.items()}
    rows = analysis.source_rows(credits, ["a"] * 4 + ["b"] * 4, 50)
    values = {(row["figure"], row["subject"], row["other"]): (row["value"], row["n"]) for row in rows}
    assert values["win_rate", "one", "a"] == (100, 4)
    assert values["win_rate", "one", "b"] == (25, 4)
    assert values["win_rate", "two", "all"] == (50, 8)
    expected = stats.pearsonr([1, 0.5, 0.25], [0.25, 0.5, 0.75]).statistic ** 2
    assert values["r2", "a", "b"] == (pytest.approx(expected), 4)
    assert values["spearman", "a", "the other sources"] == (pytest.approx(-1), 4)
    assert {row["figure"] for row in analysis.source_rows(credits, [""] * 8, 50)} == {"win_rate"}


def test_verdicts_on_the_same_instructions_are_resampled_together():
    one = credits_of([0.2, 0.4, 0.5, 0.6, 0.8], 300)
    flips = np.random.default_rng(1).random(300) < 0.1
    two = {name: {0: np.where(flips, 1 - seeds[0], seeds[0])} for name, seeds in one.items()}
    (alike,), (apart,) = (
        analysis.agreement_rows({"a": one, "b": two}, 300, ("r2",), same=same) for same in (True, False)
    )
    assert alike["high"] - alike["low"] < apart["high"] - apart["low"]


def test_an_interval_that_spans_zero_correlation_begins_at_zero():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 6))
    low, high = analysis.bounds_of("r2", x, y, tuple(rng.normal(size=(2, 300, 6))))
    assert low == 0
    assert 0 < high <= 1


def test_p_values_are_scipys_on_the_first_of_each_shuffle():
    rows = np.array([seeds[0] for seeds in credits_of([0.3, 0.5, 0.6], 60).values()])
    rows[0, :7], rows[2, 50:55] = NAN, 0.5
    pairs = [*combinations(rows, 2)]
    values = analysis.p_values(np.stack([one - two for one, two in pairs], axis=1), [10, 25, 60], 2)
    for repeat in range(2):
        order = keyed_rng(0, "paired tests", repeat).permutation(60)
        for place, size in enumerate((10, 25, 60)):
            expected = [
                stats.ttest_rel(one[order[:size]], two[order[:size]], nan_policy="omit").pvalue for one, two in pairs
            ]
            assert values[repeat, place].tolist() == pytest.approx(expected), (repeat, size)


def test_without_spread_equal_models_are_equal_and_others_are_not():
    gaps = np.stack([np.zeros(30), np.ones(30)], axis=1)
    np.testing.assert_array_equal(analysis.p_values(gaps, [10, 30], 1)[0], [[1, 0], [1, 0]])


def test_the_size_needed_is_the_one_from_which_on_the_share_stays():
    shares = np.array([[0.5, 0.95, 0.8, 0.9], [0.9, 0.9, 0.9, 1.0], [0.1, 0.95, 0.95, 0.85]])
    assert analysis.needed(shares, [50, 100, 200, 400]).tolist() == [400, 50, math.inf]


def test_models_that_are_the_same_are_called_different_in_one_of_twenty():
    credits = {f"g{place}": dict(enumerate(np.random.default_rng(place).random((4, 300)))) for place in range(12)}
    rows = analysis.null_rows(credits, repeats=3)
    assert 0.01 < rows[-1]["value"] < 0.15  # 72 pairs of 12 independent groups
    assert {row["subject"] for row in rows} == {analysis.SAME}
    assert [row["n"] for row in rows][-3:] == [200, 250, 300]
    apart = {"g": {0: np.arange(300) % 2.0, 1: np.ones(300)}}
    assert analysis.null_rows(apart, repeats=3)[-1]["value"] == 1
    assert analysis.null_rows({"g": {0: np.ones(5)}}, repeats=1) == []


def test_far_models_are_told_apart_early_and_equal_ones_never():
    rows = analysis.pair_rows(credits_of([0.1, 0.5, 0.9], 400), repeats=5)
    assert select(rows, "needed_for_90")[0]["value"] == 25
    assert select(rows, "told_apart")[-1]["value"] == 1
    (never,) = select(analysis.pair_rows(credits_of([0.5] * 3, 400), repeats=5), "needed_for_90")
    assert (never["value"], never["other"]) == (None, "not reached")


def test_pairs_are_counted_in_the_band_of_their_gap():
    place = np.arange(200)
    rates = {"a": 0, "b": 3, "c": 60}  # gaps of 1.5 and about 30 points
    rows = analysis.pair_rows({name: {0: (place < rate) * 1.0} for name, rate in rates.items()}, repeats=2)
    counts = {row["subject"]: row["models"] for row in rows if row["figure"] == "told_apart"}
    assert counts == {analysis.ALL: 3, "gap 0 to 2 points": 1, "gap 10 to 100 points": 2}
    (whole,) = {row["subject"] for row in analysis.pair_rows({"a": {0: place * 0.0}, "b": {0: place**0.0}}, 1)} - {
        analysis.ALL
    }
    assert whole == "gap 10 to 100 points"


def test_sets_of_ten_need_more_than_ten_models():
    assert not select(analysis.pair_rows(credits_of([0.5] * 10, 40), repeats=1), "told_apart", analysis.SETS)
    rows = analysis.pair_rows(credits_of(np.linspace(0.05, 0.95, 12), 400), repeats=2)
    whole, sets = (select(rows, "told_apart", subject)[-1] for subject in (analysis.ALL, analysis.SETS))
    assert sets["value"] == pytest.approx(whole["value"], abs=0.03)
    assert sets["low"] <= sets["value"] <= sets["high"]
    assert sets["models"] == 45


OWN = {"crowd", "reference_again", "gpt4", "chatgpt", "davinci001", "sft", "best_of_4", "best_of_16"}


@pytest.fixture(scope="module")
def many_questions():
    return questions(100, 300)


def test_sets_are_new_complete_and_of_the_sizes_asked_for(many_questions):
    known = {str(row) for split in SANDBOX.splits for row in SANDBOX.instructions(split)}
    assert [len(many_questions[which].references) for which in (EVAL, LIVE, FRESH)] == [100, 300, 300]
    for which in (LIVE, FRESH):
        texts = {str(row) for row in many_questions[which].instructions}
        assert len(texts) == 300
        assert not texts & known
        assert all(tasks.read(text) is not None for text in texts)
    assert {row.source for row in many_questions[FRESH].instructions} == set(EVAL_SOURCES)
    stored = dict(zip(SANDBOX.instructions(EVAL), SANDBOX.references(EVAL), strict=True))
    assert many_questions[EVAL].references == tuple(stored[row] for row in many_questions[EVAL].instructions)


def test_mixture_is_the_one_that_is_said(many_questions):
    rows = [properties(row) for row in many_questions[LIVE].instructions]
    for name, value, expected in (
        ("input", "with an input", answers.WITH_INPUT),
        ("greeting", "", answers.GREETINGS[""]),
        ("form", "", 1 - answers.ASKS_FORM),
    ):
        assert stats.binomtest(sum(row[name] == value for row in rows), 300, expected).pvalue > 0.001, name
    # Of "continue" at most four are asked for: those are too few to matter here.
    numbers = [row["count"] for row in rows]
    seen = np.array([numbers.count(word) for word in answers.COUNTS])
    assert stats.chisquare(seen, np.array(list(answers.COUNTS.values())) * seen.sum()).pvalue > 0.001


def test_held_out_users_differ_and_fresh_instructions_do_not(many_questions):
    texts = {which: question.instructions for which, question in many_questions.items()}
    far, near, none = (distances(texts[EVAL], texts[which]) for which in (LIVE, FRESH, EVAL))
    assert [*far] == ["verb", "input", "greeting", "form", "count", "category"]
    assert all(value > 0.2 for value in far.values()), far
    assert all(near[name] < far[name] for name in far)
    assert set(none.values()) == {0.0}
    assert all(each.sum() == pytest.approx(1) for each in shares(texts[LIVE]).values())


@pytest.fixture(scope="module")
def no_other_world():
    """Drawing all splits anew takes seconds: other instructions that no split has stand in for an evaluation set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "generate", lambda seed: {EVAL: [*islice(fresh_instructions(SANDBOX, seed), 60)]})
        yield


@pytest.mark.usefixtures("no_other_world")
def test_the_command_writes_what_it_says_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ALPACAFARM_DATA", raising=False)
    for name, value in (("NUM_EVAL", 30), ("NUM_LIVE", 10), ("REPEATS", 2), ("RESAMPLES", 20)):
        monkeypatch.setattr(protocol, name, (value, value))
    monkeypatch.setattr(report, "place_labels", lambda *_: None)  # seconds, and tested elsewhere
    options = protocol.ProtocolOptions(out=tmp_path, quick=True, seeds=1)
    assert protocol.run(options) == 0
    rows = rows_of(tmp_path)
    rates = {(row["subject"], row["other"], row["judge"]) for row in rows if row["figure"] == "win_rate"}
    assert {subject for subject, other, _ in rates if other == "all"} == OWN
    assert {row["level"] for row in rows} == {"sandbox"}
    assert {path.stem for path in tmp_path.glob("*.png")} == {"live", "pairs"}
    r2 = next(row for row in rows if (row["figure"], row["other"], row["judge"]) == ("r2", LIVE, "sim_eval"))
    assert f"is {float(r2['value']):.3f} [" in capsys.readouterr().out
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    assert protocol.run(options) == 0
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    assert rows_of(tmp_path) == rows


@pytest.fixture(scope="module")
def few_questions(no_other_world):
    return questions(12, 5)


def test_the_best_of_four_are_the_first_of_sixteen(few_questions):
    texts_of = {(name, which): texts for name, which, texts in answers.by_best_of_n(few_questions, 0)}
    assert {name for name, _ in texts_of} == {"best_of_4", "best_of_16"}
    for which, question in few_questions.items():
        proxy = make_oracle("surrogate", dataset=SANDBOX)
        four, sixteen = (proxy.score(question.instructions, texts_of[f"best_of_{num}", which]) for num in (4, 16))
        assert (sixteen >= four - 1e-5).all()
        assert sixteen.mean() > four.mean()


def test_answers_keep_their_seed_where_another_failed(few_questions):
    kept = ("gpt4, seed 1", "gpt4, seed 2", *(f"davinci001, seed {seed}" for seed in range(3)))
    cells = {cell.key: cell for cell in answers.cells(lambda: few_questions, range(3))}
    rows = [row for key in kept for row in cells[f"answers of {key}"].work(print)]
    judged = levels.judge_all(rows, few_questions, "human")
    assert {name: list(seeds) for name, seeds in judged[EVAL].items()} == {"gpt4": [1, 2], "davinci001": [0, 1, 2]}
    (again,) = (row for row in rows if (row["generator"], row["seed"], row["set"]) == ("gpt4", 2, LIVE))
    expected = {which: texts for _, which, texts in answers.by_writer("gpt4", few_questions, 2)}
    assert again["answers"] == list(expected[LIVE])
    every = levels.sandbox_rows(rows, few_questions, repeats=1, resamples=10)
    apart = [row["models"] for row in every if (row["figure"], row["subject"]) == ("told_apart", "all pairs")]
    assert set(apart) == {2}  # of the two seeds that both have


def test_the_figure_tells_the_agreement_with_the_whole_evaluation_set():
    rates = [rate_row(f"g{i}", which, np.eye(4)[i]) for i in range(3) for which in (EVAL, LIVE, FRESH)]
    agreed = [make_row("r2", subject, LIVE, value) for subject, value in ((EVAL, 0.25), (levels.NO_INPUT, 0.75))]
    (axis,) = report.draw_live(frame_of(placed("live", "sandbox", "human", [*rates, *agreed])), "").axes
    assert axis.get_title(loc="left") == "16 simulated human raters: r² live 0.250"


NUM = 60
SOURCES = ("oasst", "koala")
RATES = {"weak": 0.2, "fair": 0.4, "good": 0.6, "best": 0.9}


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_table(path, rows):
    lines = [",win_rate,standard_error", *(f"{name},{rate},{error}" for name, (rate, error) in rows.items())]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def verdicts(seed, names):
    rng = np.random.default_rng(seed)
    return {name: (rng.random(NUM) < RATES[name]).astype(float).tolist() for name in names}


def judgement_rows(credits):
    # Indices count from 10, and the file does not hold them in order.
    return [
        {"index": 10 + i, "generator": name, "preference": value}
        for name, values in credits.items()
        for i, value in reversed(list(enumerate(values)))
    ]


@pytest.fixture
def bundle(tmp_path):
    """Four models judged by GPT-4, three of them by Claude, and two published tables."""
    path = tmp_path / "data"
    questions = [{"index": 10 + i, "instruction": f"Q {i}", "input": "", "dataset": SOURCES[i % 2]} for i in range(NUM)]
    write_lines(path / "eval_instructions.jsonl.gz", questions)
    write_lines(path / "davinci003.jsonl.gz", [{**row, "output": "r", "generator": "ref"} for row in questions])
    pin = {"reference_sha256": reference_digest([row["instruction"] for row in questions], ["r"] * NUM)}
    (path / "recorded.json").write_text(json.dumps(pin), encoding="utf-8")
    for name in RATES:
        outputs = [{**row, "output": f"{name} {row['index']}", "generator": name} for row in questions]
        write_lines(path / "outputs" / f"outputs_{name}.jsonl.gz", outputs)
    gpt4 = verdicts(0, RATES)
    gpt4["weak"][3] = None
    write_lines(path / "preferences_alpaca_eval_gpt4.jsonl.gz", judgement_rows(gpt4))
    extras = path / "extras"
    write_lines(extras / "preferences_claude.jsonl.gz", judgement_rows(verdicts(1, ["weak", "fair", "best"])))
    table = {name: (100 * rate, 2.0) for name, rate in RATES.items()}
    write_table(extras / "leaderboard_alpaca_eval_gpt4.csv.gz", {**table, "ref": (50.0, 0.0), "copy": (20.0, 2.0)})
    write_table(extras / "leaderboard_claude.csv.gz", {**table, "ref": (50.0, 0.0), "copy": (70.0, 2.1)})
    return path


def find(rows, figure, subject, other):
    return next(row for row in rows if (row["figure"], row["subject"], row["other"]) == (figure, subject, other))


def test_all_rows_of_a_small_folder_and_of_one_without_extras(bundle):
    rows = levels.recorded_rows(load(bundle), repeats=2, resamples=50)
    for row, values in zip(
        (row for row in rows if (row["figure"], row["subject"], row["other"]) == ("win_rate", "fair", "koala")),
        (verdicts(0, RATES), verdicts(1, ["weak", "fair", "best"])),
        strict=True,
    ):  # each verdict stands at the place of its instruction
        assert (row["value"], row["n"]) == (pytest.approx(100 * np.mean(values["fair"][1::2])), NUM // 2)
    assert find(rows, "win_rate", "weak", "all")["n"] == NUM - 1
    both = find(rows, "spearman", "gpt4 recorded", "claude recorded")
    assert (both["value"], both["models"], both["n"]) == (pytest.approx(1), 3, NUM)
    tables = find(rows, "kendall", "gpt4 published", "claude published")
    assert tables["models"] == 5  # the reference, without error, is no model
    clean = find(rows, "kendall", "gpt4 published", "claude published, without rows that are equal")
    assert (clean["value"], clean["models"]) == (pytest.approx(1), 3)
    assert find(rows, "largest_difference", "recorded", "published")["models"] == 4
    assert {row["judge"] for row in rows if row["part"] == "pairs"} == {"gpt4", "claude", levels.EARLY}
    shutil.rmtree(bundle / "extras")
    assert {row["judge"] for row in levels.recorded_rows(load(bundle), repeats=2, resamples=20)} == {"gpt4"}


@pytest.mark.parametrize(
    "content", [b"no gzip", gzip.compress(b"a,b\n1,2\n", mtime=0), gzip.compress(b",win_rate\nx,1\n", mtime=0)]
)
def test_another_table_is_refused(tmp_path, content):
    (tmp_path / "table.csv.gz").write_bytes(content)
    with pytest.raises(DataError, match="expected a gzip CSV table"):
        levels.published(tmp_path / "table.csv.gz")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 1.0), (0, 1.0)], "record 2: expected one judgement of a generator and index"),
        ([(5, 1.0)], "record 1: expected the index of an instruction"),
        ([(0, 3.0)], "expected a number in \\[0, 1\\] or null, got 3.0"),
    ],
)
def test_faulty_verdicts_are_named(tmp_path, rows, message):
    path = tmp_path / "preferences_claude.jsonl.gz"
    write_lines(path, [{"index": index, "generator": "m", "preference": value} for index, value in rows])
    with pytest.raises(DataError, match=message):
        levels.read_credits(path, [0, 1])
