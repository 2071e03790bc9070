"""The recorded folder is made of a checkout of AlpacaEval's shape: what goes in, what stays out, what is refused."""

import gzip
import hashlib
import json
import os

import numpy as np
import pytest

from alpacafarm_env.__main__ import main
from alpacafarm_env.data import alpaca_eval, load_dataset
from alpacafarm_env.data.alpaca_eval import GAMED, WEIGHTED, make_recorded
from alpacafarm_env.errors import DataError

APART = [("Name a colour.", ""), ("Translate to French.", "Good morning"), ("Count to three.", ""), ("Say hello.", "")]
TEXTS = [f"{instruction}\n\n{more}" if more else instruction for instruction, more in APART]
REFERENCE = [f"Reference {i}." for i in range(4)]


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def add_model(checkout, model, preferences=None, *, annotator="alpaca_eval_gpt4", place=None, reference=REFERENCE):
    outputs = [f"{model} {i}." for i in range(4)]
    rows = [{"instruction": text, "dataset": "own"} for text in TEXTS]
    own = [{**row, "output": each, "generator": model} for row, each in zip(rows, outputs, strict=True)]
    put(checkout / "results" / model / "model_outputs.json", own)
    if preferences is not None:
        verdicts = [
            {**row, "output_1": a, "output_2": b, "generator_1": "text_davinci_003", "generator_2": model}
            | {"annotator": annotator, "preference": preference}
            for row, a, b, preference in zip(rows, reference, outputs, preferences, strict=True)
        ]
        put(checkout / "results" / model / (annotator if place is None else place) / "annotations.json", verdicts)


@pytest.fixture
def checkout(tmp_path):
    """The shape of the newest commit, with the defects that it is known to have."""
    root = tmp_path / "alpaca_eval"
    add_model(root, "good", [1, 2, 2.0, None])
    add_model(root, "old-codes", [0, 1.5, 1, 2])
    add_model(root, "misplaced", [2, 2, 2, 2], place="alpaca_eval_gpt4_turbo_fn")
    add_model(root, "other-judge", [1, 1, 1, 1], annotator="alpaca_eval_gpt4_turbo_fn")
    add_model(root, "other-reference", [2, 2, 2, 1], reference=["Short."] * 4)
    add_model(root, "text_davinci_003")
    add_model(root, "no-verdicts")
    (root / "results" / "no-verdicts" / "alpaca_eval_gpt4").mkdir()
    add_model(root, "copied")
    put(
        root / "results" / "copied" / "alpaca_eval_gpt4" / "annotations.json",
        (root / "results" / "good" / "alpaca_eval_gpt4" / "annotations.json").read_text(),
    )
    add_model(root, GAMED[0], [1.25, 1.5, 2, 1], annotator=WEIGHTED)
    add_model(root, GAMED[1])
    put(root / "src/alpaca_eval/leaderboards/data_AlpacaEval/alpaca_eval_gpt4_leaderboard.csv", ",win_rate\ngood,50\n")
    return root


@pytest.fixture
def older(tmp_path):
    """The shape of commits of 2023: Claude's verdicts, the inputs apart, GPT-4's repeated verdicts."""
    root = tmp_path / "alpaca_eval_2023"
    add_model(root, "good", [2, 1, 1, 2], annotator="claude", place="")
    rows = [{"instruction": text, "input": more} for text, more in APART]
    put(root / "example" / "eval_gpt.json", [{**row, "output": "Yes.", "dataset": "own"} for row in rows])
    pairs = [{**row, "output_1": "A.", "output_2": "B."} for row in [*rows, {"instruction": "Unknown.", "input": ""}]]
    for judge in ("gpt4_b1", "gpt4_b5"):
        for seed in range(4):
            verdicts = [{**pair, "preference": 2 if seed else 1} for pair in pairs]
            put(root / f"src/alpaca_eval/configs/{judge}/annotations_seed{seed}_configs.json", verdicts)
    return root


def read(path):
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def test_the_folder_is_read_as_recorded_judgements(checkout, older, tmp_path):
    out = tmp_path / "new" / "data"
    make_recorded([checkout, older], out)
    data = load_dataset(str(out))
    assert data.judged == ("good", "misplaced", "old-codes")
    assert {*data.generators} == {*data.judged, "other-reference", *GAMED}
    np.testing.assert_array_equal(data.judgements("good"), [0, 1, 1, np.nan])
    np.testing.assert_array_equal(data.judgements("old-codes"), [0.5, 0.5, 0, 1])
    assert data.references("eval") == tuple(REFERENCE)
    assert data.outputs("misplaced") == tuple(f"misplaced {i}." for i in range(4))
    assert [(each.instruction, each.input) for each in data.instructions("eval")] == APART
    assert [path.name for path in out.parent.iterdir()] == ["data"]


def test_extras_hold_other_judges_references_and_repeats(checkout, older, tmp_path):
    make_recorded([checkout, older], tmp_path / "out")
    extras = tmp_path / "out" / "extras"
    claude = read(extras / "preferences_claude.jsonl.gz")
    assert [(row["generator"], row["preference"]) for row in claude] == [("good", x) for x in (1, 0, 0, 1)]
    assert {row["first_shown"] for row in claude} <= {"model", "reference"}
    assert len(read(extras / "preferences_gpt4_vs_davinci003_alt.jsonl.gz")) == 4
    other = [row["output"] for row in read(extras / "davinci003_alt_results_dir.jsonl.gz")]
    assert other == [f"text_davinci_003 {i}." for i in range(4)]
    gamed = read(extras / f"preferences_{WEIGHTED}_gamed.jsonl.gz")
    assert [row["preference"] for row in gamed] == [0.25, 0.5, 1, 0]
    repeated = read(extras / "crossannotations_gpt4_4seeds.jsonl.gz")
    assert [row["index"] for row in repeated] == [0, 1, 2, 3, None]
    assert repeated[1]["input"] == "Good morning"
    assert repeated[0]["preference_gpt4_b5"] == [0, 1, 1, 1]
    assert gzip.decompress((extras / "leaderboard_alpaca_eval_gpt4.csv.gz").read_bytes()) == b",win_rate\ngood,50\n"


def test_what_is_left_out_is_listed_with_reasons(checkout, tmp_path, capsys):
    assert main(["data", "alpaca-eval", str(checkout), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    listed = json.loads((tmp_path / "out" / "recorded.json").read_text())
    for model in ("other-judge", "other-reference", "copied", "no-verdicts"):
        (reason,) = (why for what, why in listed["left_out"].items() if model in what)
        assert reason in printed
    assert any("copied" in what and "good" in why for what, why in listed["left_out"].items())
    assert "CC BY-NC 4.0" in printed
    for name, each in listed["files"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert each["sha256"] == hashlib.sha256(content).hexdigest()
        assert each["rows"] == len(gzip.decompress(content).splitlines())


def test_the_newest_checkout_wins(checkout, older, tmp_path):
    add_model(older, "good", [2, 2, 2, 2])
    make_recorded([checkout, older], tmp_path / "out")
    np.testing.assert_array_equal(load_dataset(str(tmp_path / "out")).judgements("good"), [0, 1, 1, np.nan])


def test_the_same_checkout_gives_the_same_bytes(checkout, tmp_path):
    for name in ("one", "two"):
        make_recorded([checkout], tmp_path / name)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)


@pytest.mark.parametrize(
    "content", ["[", '{"a": 1}', '[{"instruction": 1}]', "[" * 100_000, "\x00", '[{"preference": 3}]']
)
def test_faulty_verdicts_are_left_out(checkout, tmp_path, content):
    put(checkout / "results" / "bad" / "alpaca_eval_gpt4" / "annotations.json", content)
    make_recorded([checkout], tmp_path / "out")
    assert "bad" not in load_dataset(str(tmp_path / "out")).generators
    assert any("/bad/" in what for what in json.loads((tmp_path / "out" / "recorded.json").read_text())["left_out"])


def test_files_from_elsewhere_too_large_or_special_are_not_read(checkout, tmp_path, monkeypatch):
    secret = tmp_path / "secret.json"
    secret.write_text((checkout / "results" / "good" / "alpaca_eval_gpt4" / "annotations.json").read_text())
    verdicts = checkout / "results" / "good" / "alpaca_eval_gpt4" / "annotations.json"
    verdicts.unlink()
    verdicts.symlink_to(secret)
    pipe = checkout / "results" / "old-codes" / "alpaca_eval_gpt4" / "annotations.json"
    pipe.unlink()
    os.mkfifo(pipe)
    large = checkout / "results" / "large" / "alpaca_eval_gpt4" / "annotations.json"
    put(large, " " * 10_000)
    monkeypatch.setattr(alpaca_eval, "MAX_FILE_BYTES", 9_999)
    make_recorded([checkout], tmp_path / "out")
    assert load_dataset(str(tmp_path / "out")).judged == ("misplaced",)
    left_out = json.loads((tmp_path / "out" / "recorded.json").read_text())["left_out"]
    assert {str(verdicts), str(pipe), str(large)} <= {*left_out}


def test_other_folders_are_refused_and_nothing_is_left(tmp_path):
    empty = tmp_path / "empty"
    (empty / "results" / "model").mkdir(parents=True)
    for folder in (tmp_path / "absent", tmp_path, empty):
        with pytest.raises(DataError, match="expected"):
            make_recorded([folder], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("kind", ["folder", "file", "dangling"])
def test_nothing_is_written_over(checkout, tmp_path, kind):
    out = tmp_path / "mine"
    if kind == "folder":
        put(out / "notes.txt", "mine")
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match="mine"):
        make_recorded([checkout], out)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupted_run_leaves_nothing(checkout, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(alpaca_eval.gzip, "compress", interrupt)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        make_recorded([checkout], tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before
