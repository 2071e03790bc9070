"""Surrogates of recorded verdicts: what training may see, arithmetic by hand, a planted world, the whole command."""

import gzip
import json
import os
import re
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="install alpacafarm-env[recorded]")

from written import rows_of

from alpacafarm_env.benchmarks.harness.study import Study
from alpacafarm_env.benchmarks.recorded_surrogate import command, data, models, networks, results
from alpacafarm_env.data import load_dataset
from alpacafarm_env.data.recorded import reference_digest
from alpacafarm_env.errors import DataError
from alpacafarm_env.seeding import keyed_rng

M, N = 10, 60
GOOD = "splendid answer"


def world(seed=0, rate=lambda m: 0.3 + 0.07 * m):
    """Models write filler of random length; the judge prefers whoever writes the good words, whatever the length."""
    rng = keyed_rng(seed, "world")
    good = rng.random((M, N)) < np.array([rate(m) for m in range(M)])[:, None]
    outputs = tuple(
        tuple("filler word " * int(rng.integers(1, 12)) + (GOOD if good[m, i] else "plain reply") for i in range(N))
        for m in range(M)
    )
    return data.Judged(
        tuple(f"model-{m}" for m in range(M)),
        tuple(f"Question number {i}?" for i in range(N)),
        tuple("some reference text here" for _ in range(N)),
        outputs,
        good.astype(np.float64),
    )


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(results, "NUM_RESAMPLES", 50)


@pytest.fixture(scope="module")
def planted():
    judged = world()
    return judged, data.Features(judged)


@pytest.mark.parametrize("folds", [2, 5])
def test_no_test_model_or_instruction_is_ever_trained_on(planted, folds):
    judged, _ = planted
    for protocol in (*data.PROTOCOLS, *data.POOLS):
        tested = np.zeros((M, N), dtype=int)
        for train, test in data.parts(judged, protocol, folds):
            assert train.any()
            assert test.any()
            assert not (train.any(axis=1) & test.any(axis=1)).any(), "a model in both"
            if protocol != "models":
                assert not (train.any(axis=0) & test.any(axis=0)).any(), "an instruction in both"
            tested += test
        wanted = judged.members(protocol)[:, None] if protocol in data.POOLS else np.ones((M, 1))
        assert (tested == wanted).all(), "each pair once"


def test_the_diagonal_tests_one_fold_in_each_row_and_column(planted):
    judged, _ = planted
    tested = sum(test.astype(int) for _, test in data.parts(judged, "disjoint", 5, diagonal=True))
    assert tested.max() == 1
    assert tested.sum() == M * N / 5
    assert (tested.sum(axis=1) > 0).all()


def remember(features, rows, labels, weights):
    """Knows the usual verdict on each instruction it saw, and reads nothing."""
    count = len(features.judged.instructions)
    wins = np.bincount(rows % count, labels - 0.5, minlength=count)
    return lambda test: wins[test % count] + 1e-9


def test_memory_of_instructions_helps_only_the_protocol_that_shares_them():
    hard = keyed_rng(3, "hard").random(N) < 0.5
    judged = replace(world(), credits=np.tile(hard, (M, 1)) * 1.0)
    memory = models.Surrogate("memory", remember)
    right = {
        name: ((models.score(judged, data.Features(judged), memory, name, 5) > 0) == hard).mean()
        for name in data.PROTOCOLS
    }
    # Where nothing is remembered it always says one thing.
    assert right == {"models": 1, "disjoint": pytest.approx(hard.mean())}


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        *((name, 0.9, 1.01) for name in ("trees", "linear", "words", "characters", "bag")),
        *(("longer", 0, 0.7), (models.BASELINE, 0, 0.8)),
    ],
)
def test_surrogates_find_what_the_judge_likes_and_the_baselines_do_not(planted, name, low, high, monkeypatch):
    monkeypatch.setitem(networks.EPOCHS, "bag", 20)  # an epoch is five steps here
    judged, features = planted
    found = models.score(judged, features, models.SURROGATES[name], "disjoint", 2)
    right = ((found > 0) == (judged.credits == 1))[~np.isnan(found)].mean()
    assert low < right < high


@pytest.mark.parametrize("encoder", ["bag", "transformer"])
def test_networks_learn_alike_twice(planted, encoder, monkeypatch):
    judged, features = planted
    monkeypatch.setitem(networks.EPOCHS, encoder, 1)
    monkeypatch.setitem(networks.LENGTHS, encoder, 24)
    rows = np.flatnonzero(judged.decisive)
    first, second = (
        networks.train(encoder, features, rows, judged.credits.ravel()[rows], np.ones(len(rows))) for _ in range(2)
    )
    assert np.isfinite(first(rows)).all()
    assert (first(rows) == second(rows)).all()
    assert len(np.unique(first(rows))) > 10


def test_identical_texts_have_no_difference_and_known_measures():
    judged = world()
    same = data.Features(replace(judged, outputs=(judged.references,) * M))
    assert (same.dense[:, : len(data.measures("", ""))] == 0).all()
    assert (same.length_and_list == 0).all()
    assert np.abs(same.words).max() == 0
    found = data.measures("Name three colours", "I'm sorry, I can't: red\n- red blue 42")
    assert found["refusal"] == found["refusal at the start"] == found["has a list"] == 1
    assert found["log list items"] == pytest.approx(np.log(2))
    assert found["instruction's words used"] == 0
    assert found["digits"] == pytest.approx(2 / 37)
    assert all(np.isfinite(list(data.measures("", "").values()))), "an empty response has measures"


def test_a_model_that_always_wins_weighs_nothing():
    credits = world().credits.copy()
    credits[0], credits[1] = 1, np.arange(N) % 2
    judged = replace(world(), credits=credits)
    weights = models.informativeness(judged, judged.decisive)
    assert len(weights) == M * N
    assert (weights[:N] == 0).all()
    assert (weights[N : 2 * N] == 1).all()


def test_auc_counts_ties_half_and_agrees_with_the_library():
    from sklearn.metrics import roc_auc_score

    assert results.auc(np.array([1.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0])) == pytest.approx(0.75)
    assert np.isnan(results.auc(np.array([1.0, 2.0]), np.array([1.0, 1.0])))
    rng = keyed_rng(0, "auc")
    scores, labels, weights = rng.integers(0, 9, 200) * 1.0, rng.integers(0, 2, 200) * 1.0, rng.random(200)
    assert results.auc(scores, labels, weights) == pytest.approx(roc_auc_score(labels, scores, sample_weight=weights))


def test_the_error_counts_models_and_instructions_as_clusters():
    each = np.array([0.1, 0.4, 0.3, 0.9])
    tested = np.ones((4, 50), dtype=bool)
    by_model = np.tile(each[:, None], (1, 50))
    assert results.two_way_error(by_model, tested) == pytest.approx(each.std(ddof=1) / 2)
    # All models alike: the models alone would say 0, yet there are 50 instructions.
    values = keyed_rng(0, "rows").random(50)
    shared = np.tile(values, (4, 1))
    assert results.two_way_error(shared, tested) == pytest.approx(values.std() / np.sqrt(50) * np.sqrt(3 / 4), rel=0.2)
    assert np.isnan(results.two_way_error(shared[:1], tested[:1]))


def test_best_of_n_equals_the_mean_over_all_subsets():
    judged = world(rate=lambda m: 0.5)
    credits = judged.credits.copy()
    credits[2, 5] = np.nan  # an instruction where one candidate has no verdict is left out
    judged = replace(judged, credits=credits)
    reward = keyed_rng(1, "reward").random((M, N))
    scores = {(pool, name): reward for pool in data.POOLS for name in (models.CHOSEN, models.BASELINE)}
    rows = {(r["pool"], r["chooser"], r["n"]): r for r in results.best_of_n_rows(judged, scores)}
    members = np.flatnonzero(judged.near)
    kept = [i for i in range(N) if not np.isnan(credits[members, i]).any()]
    assert len(kept) == (N - 1 if 2 in members else N)
    length = np.array([[len(text) for text in row] for row in judged.outputs])
    for n in (1, 2, 3, len(members)):
        for chooser, by in ((models.CHOSEN, reward), (results.JUDGE, credits)):
            picks = [credits[max(group, key=lambda m: by[m, i]), i] for i in kept for group in combinations(members, n)]
            row = rows["near_reference", chooser, n]
            assert (row["win_rate"], row["num_instructions"]) == (pytest.approx(100 * np.mean(picks)), len(kept))
        longest = [max(length[list(group), i]) for i in kept for group in combinations(members, n)]
        assert rows["near_reference", results.LONGEST, n]["length"] == pytest.approx(np.mean(longest))
    judge = [rows["near_reference", results.JUDGE, n]["win_rate"] for n in range(1, len(members) + 1)]
    assert judge == sorted(judge)
    for (pool, chooser, n), row in rows.items():
        longest = rows[pool, results.LONGEST, n]["win_rate"]
        assert row["over_longest"] == pytest.approx(row["win_rate"] - longest), chooser
        assert row["gain"] == pytest.approx(row["win_rate"] - rows[pool, chooser, 1]["win_rate"])


def test_each_surrogate_stands_beside_the_strongest_baseline_on_its_own_pairs():
    judged = world()
    truth = np.where(judged.credits == 1, 1.0, -1.0)
    half = truth.copy()
    half[:, ::2] *= -1
    some = truth.copy()
    some[:, 20:] = np.nan
    scores = {("disjoint", "longer"): -truth, ("disjoint", "majority"): half, ("disjoint", "trees"): some}
    rows = {(row["surrogate"], row["group"]): row for row in results.accuracy_rows(judged, scores)}
    row = rows["trees", "all"]
    assert (row["beside"], row["num_pairs"], row["models_ahead"]) == ("majority", 20 * M, M)
    assert (row["accuracy"], row["auc"], row["difference"]) == (1, 1, pytest.approx(0.5))
    assert rows["majority", "all"]["beside"] is None
    assert rows["longer", "all"]["difference"] == pytest.approx(-0.5)


def test_one_near_reference_model_has_no_interval(tmp_path):
    judged = world(rate=lambda m: 0.5 if m == 0 else 0.9)
    assert judged.near.sum() == 1
    noise = keyed_rng(0, "one model").normal(size=(2, M, N))
    scores = {("disjoint", "longer"): noise[0], ("disjoint", "trees"): noise[1] + judged.credits}
    table = results.accuracy_rows(judged, scores)
    (row,) = (row for row in table if (row["group"], row["surrogate"]) == ("near_reference", "trees"))
    missing = ("accuracy_low", "accuracy_high", "auc_low", "auc_high", "standard_error", "z")
    assert [row[name] for name in missing] == [None] * 6
    assert row["num_models"] == 1
    (many,) = (row for row in table if (row["group"], row["surrogate"]) == ("all", "trees"))
    assert many["accuracy_low"] < many["accuracy"] < many["accuracy_high"]
    assert many["standard_error"] > 0
    study = Study(tmp_path, "recorded_surrogate", {})
    command.write_results(study, judged, scores, "my_judge", {})
    said = json.loads((tmp_path / "manifest.json").read_text())["facts"]["findings"]
    assert f"{100 * row['difference']:+.1f} points, – standard errors" in said[2]
    table = rows_of(tmp_path)
    assert table[2]["standard_error"] == table[2]["accuracy_low"] == ""
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "nan" not in re.sub(r'base64,[^"]*', "", html)


def test_a_pool_without_two_whole_instructions_has_no_best_of_n():
    judged = world(rate=lambda m: 0.5)
    hole = (np.arange(N) % M == np.arange(M)[:, None]) & (np.arange(N) > 0)
    judged = replace(judged, credits=np.where(hole, np.nan, judged.credits))
    scores = {(pool, name): np.zeros((M, N)) for pool in data.POOLS for name in (models.CHOSEN, models.BASELINE)}
    assert judged.near.all()
    assert results.best_of_n_rows(judged, scores) == []


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, planted):
    judged, _ = planted
    path = tmp_path_factory.mktemp("recorded") / "data"
    asked = [{"index": i, "instruction": text, "input": ""} for i, text in enumerate(judged.instructions)]
    write_lines(path / "eval_instructions.jsonl.gz", asked)
    texts = {"ref": judged.references, **dict(zip(judged.models, judged.outputs, strict=True))}
    for name, column in texts.items():
        rows = [{**row, "output": text, "generator": name} for row, text in zip(asked, column, strict=True)]
        file = path / "davinci003.jsonl.gz" if name == "ref" else path / "outputs" / f"outputs_{name}.jsonl.gz"
        write_lines(file, rows)
    credits = zip(judged.models, judged.credits.tolist(), strict=True)
    verdicts = [{"index": i, "generator": m, "preference": c} for m, row in credits for i, c in enumerate(row)]
    write_lines(path / "preferences_my_judge.jsonl.gz", verdicts)
    digest = reference_digest(judged.instructions, judged.references)
    (path / "recorded.json").write_text(json.dumps({"reference_sha256": digest}))
    return path


def test_the_command_writes_what_it_says_and_resumes(folder, tmp_path, capsys):
    args = ["--data", str(folder), "--quick", "--surrogates", "trees", "--out", str(tmp_path / "out")]
    assert command.main(args) == 0
    printed, out = capsys.readouterr().out, tmp_path / "out"
    table = {(row["protocol"], row["group"], row["surrogate"]): row for row in rows_of(out)}
    best = table["disjoint", "near_reference", "trees"]
    assert float(best["accuracy"]) > 0.9
    assert float(best["z"]) > 2
    assert f"{float(best['accuracy']):.1%} and AUC {float(best['auc']):.3f}" in printed
    assert "1 of 1 surrogates tried are better" in printed
    which = ("disjoint", "trees", "True")
    near = [
        float(row["accuracy"])
        for row in rows_of(out, "models.csv")
        if (row["protocol"], row["surrogate"], row["near_reference"]) == which
    ]
    assert np.mean(near) == pytest.approx(float(best["accuracy"]))
    drawn = rows_of(out, "best_of_n.csv")
    assert {row["chooser"] for row in drawn} == {models.CHOSEN, models.BASELINE, results.LONGEST, results.JUDGE}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in ("accuracy.png", "best_of_n.png"))
    page = (out / "report.html").read_text(encoding="utf-8")
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["complete"]
    assert manifest["facts"]["judge"] == "my_judge"
    assert all(sentence.split("'")[0] in page for sentence in manifest["facts"]["findings"])
    cell = out / "cells" / "disjoint-trees.json"
    before = cell.stat().st_mtime_ns, (out / "table.csv").read_bytes()
    assert command.main(args) == 0
    assert (cell.stat().st_mtime_ns, (out / "table.csv").read_bytes()) == before
    cell.write_text('{"key": "disjoint trees", "rows": [{"cell": "disjoint trees", "cpu_seconds": 1.0}]}')
    assert command.main(args) == 2
    assert str(cell) in capsys.readouterr().err


def test_bad_calls_say_what_to_do(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ALPACAFARM_DATA", raising=False)
    assert command.main(["--out", str(tmp_path / "a")]) == 2
    assert "ALPACAFARM_DATA" in capsys.readouterr().err
    assert command.main(["--data", str(folder), "--surrogates", "tree", "--out", str(tmp_path / "b")]) == 2
    assert "trees" in capsys.readouterr().err
    judged = world()
    with pytest.raises(DataError, match="4 or more models"):
        replace(judged, models=judged.models[:3], outputs=judged.outputs[:3], credits=judged.credits[:3])


def test_without_the_library_the_command_says_what_to_install(folder, tmp_path, capsys, monkeypatch):
    finder = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(command, "importlib", finder)
    assert command.main(["--data", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "alpacafarm-env[recorded]" in capsys.readouterr().err


@pytest.mark.data
def test_the_published_verdicts_and_what_length_alone_says_of_them():
    judged = data.read_judged(load_dataset(os.environ["ALPACAFARM_DATA"]))
    assert judged.credits.shape == (39, 805)
    assert judged.decisive.sum() == 31_395 - 52 - 186
    assert judged.near.sum() == 8
    features, names = data.Features(judged), ("majority", "longer", models.BASELINE)
    scores = {
        ("disjoint", name): models.score(judged, features, models.SURROGATES[name], "disjoint", 5) for name in names
    }
    rows = {row["surrogate"]: row for row in results.accuracy_rows(judged, scores) if row["group"] == "near_reference"}
    # Counted independently; another selection of eight models was published with 67.1 and 69.2 %.
    assert rows["longer"]["accuracy"] == pytest.approx(0.675, abs=0.001)
    assert rows[models.BASELINE]["accuracy"] == pytest.approx(0.697, abs=0.005)
    assert rows[models.BASELINE]["auc"] == pytest.approx(0.752, abs=0.01)
