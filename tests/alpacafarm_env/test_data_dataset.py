"""Folders, hub datasets and recorded judgements: splits, references, overlap, and what is pinned."""

import copy
import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from alpacafarm_env import data
from alpacafarm_env.data import Dataset, FolderDataset, HubDataset, RecordedDataset, load_dataset
from alpacafarm_env.data.recorded import reference_digest
from alpacafarm_env.errors import DataError, UnknownNameError
from alpacafarm_env.instructions import Demonstration, Instruction

FILES = {
    "sft": [
        {"instruction": "Say a.", "input": "", "output": "a"},
        {"instruction": "Say b.", "input": "x", "output": "b"},
    ],
    "preference": [
        {"instruction": "Say c.", "input": "", "output_1": "c", "output_2": "d", "preference": 1},
        {"instruction": "Say d.", "input": "", "output_1": "c", "output_2": "d", "preference": 2},
        {"instruction": "Say c.", "input": "", "output_1": "c", "output_2": "e", "preference": 1},
    ],
    "unlabeled": [{"instruction": "Say e."}, {"instruction": "Say e.", "input": "twice"}],
    "val": [{"instruction": "Say f.", "input": "", "output": ["f", "F"]}],
    "eval": [{"instruction": "Say g.", "input": "", "output": "g", "generator": "davinci", "dataset": "koala"}],
}


def make_folder(path, **changes):
    path.mkdir(exist_ok=True)
    for name, rows in {**FILES, **changes}.items():
        (path / f"{name}.json").unlink(missing_ok=True)
        if rows is not None:
            (path / f"{name}.json").write_text(json.dumps(rows))
    return path


def test_a_folder_serves_every_kind_once(tmp_path):
    folder = make_folder(tmp_path)
    dataset = load_dataset(str(folder))
    assert load_dataset(folder) is load_dataset(dataset) is copy.deepcopy(dataset) is dataset
    assert isinstance(dataset, Dataset)
    assert dataset.level == "live"
    assert dataset.splits == ("sft", "preference", "unlabeled", "val", "eval")
    assert "sft: 2" in repr(dataset)
    assert dataset.instructions("unlabeled") == ("Say e.", "Say e.\n\ntwice")
    assert dataset.instructions("unlabeled") is dataset.instructions("unlabeled")
    demonstration = dataset.demonstrations()[1]
    assert demonstration == Demonstration(Instruction("Say b.", "x"), "b")
    assert (demonstration.instruction.id, demonstration.instruction.split_name) == (1, "sft")
    assert dataset.references("eval") == ("g",)
    assert dataset.instructions("eval")[0].source == "koala"


def test_several_pairs_for_one_instruction(tmp_path):
    dataset = FolderDataset(make_folder(tmp_path))
    assert dataset.instructions("preference") == ("Say c.", "Say d.")
    assert [i.id for i in dataset.instructions("preference")] == [0, 1]
    assert [(str(p.instruction), p.chosen, p.rejected) for p in dataset.preferences()] == [
        ("Say c.", "c", "d"),
        ("Say d.", "d", "c"),
        ("Say c.", "c", "e"),
    ]


def test_unknown_splits_and_unfit_kinds(tmp_path):
    dataset = FolderDataset(make_folder(tmp_path))
    with pytest.raises(UnknownNameError, match="'eval'"):
        dataset.instructions("evl")
    with pytest.raises(DataError, match=r"unlabeled\.json: references .*demonstration .*got instruction"):
        dataset.references("unlabeled")
    with pytest.raises(DataError, match=r"sft\.json: preferences "):
        dataset.preferences("sft")


def test_overlapping_splits_are_refused_unless_permitted(tmp_path):
    folder = make_folder(tmp_path, eval=[{"instruction": "New."}, {"instruction": "Say b.", "input": "x"}])
    for load in (FolderDataset, load_dataset):
        with pytest.raises(DataError, match="--allow-overlap") as error:
            load(folder)
        assert all(part in str(error.value) for part in ("eval.json: 1 ", "record 2 field 'instruction'"))
        assert f"record 2 of {folder / 'sft.json'}" in str(error.value)
        assert load(folder, allow_overlap=True).instructions("eval") == ("New.", "Say b.\n\nx")


def test_repeated_instructions_are_refused(tmp_path):
    folder = make_folder(tmp_path, unlabeled=[{"instruction": "x"}, {"instruction": "y"}, {"instruction": "x"}])
    with pytest.raises(DataError, match=r"record 3 field 'instruction': .* record 1: 'x'"):
        FolderDataset(folder)


def test_repeated_pairs_are_counted_by_a_warning(tmp_path):
    first, second, third = FILES["preference"]
    swapped = {**first, "output_1": "d", "output_2": "c", "preference": 2}
    rows = [first, second, first, swapped, {**first, "preference": 2}, third]
    with pytest.warns(UserWarning, match=r"preference\.json: 3 of 6 .* labels: 1\.") as caught:
        dataset = FolderDataset(make_folder(tmp_path, preference=rows))
    assert len(caught) == 1
    assert [each.chosen for each in dataset.preferences()] == ["c", "d", "c", "c", "d", "c"]
    assert dataset.instructions("preference") == ("Say c.", "Say d.")


@pytest.mark.parametrize(
    ("rows", "split"), [(FILES["sft"], "sft"), (FILES["preference"], "preference"), (FILES["unlabeled"], "unlabeled")]
)
def test_train_is_the_split_of_its_rows(tmp_path, monkeypatch, rows, split):
    alone = dict.fromkeys(FILES)
    named = {"train": rows, "validation": FILES["val"], "test": FILES["eval"], "other": [{"anything": 1}]}
    fake_datasets(monkeypatch, lambda *_, **__: named)
    for dataset in (FolderDataset(make_folder(tmp_path, **alone, **named)), HubDataset("a/b")):
        assert dataset.splits == (split, "val", "eval")
        assert dataset.instructions(split)[0].split_name == split
        assert dataset.references("eval") == ("g",)
    for name, expected in (("train", split), ("mine", split), ("eval", "eval")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = load_dataset(tmp_path / f"{name}.jsonl")
        assert dataset.splits == (expected,)
        assert load_dataset(str(tmp_path / f"{name}.jsonl")) is dataset
    make_folder(tmp_path / "both", **alone, train=rows)
    (tmp_path / "both" / f"{split}.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(DataError, match=rf"{split}\.jsonl.*train\.json"):
        FolderDataset(tmp_path / "both")


def test_sft_may_have_several_demonstrations_of_an_instruction(tmp_path):
    rows = [{"instruction": "x", "output": output} for output in ("a", "b")]
    dataset = FolderDataset(make_folder(tmp_path, sft=rows))
    assert [each.response for each in dataset.demonstrations()] == ["a", "b"]
    assert len(dataset.instructions("sft")) == len(dataset.references("sft")) == 2
    for split in ("sft", "eval"):  # the same demonstration, and an instruction that is evaluated, count once
        faulty = make_folder(tmp_path / split, **{split: [rows[0], *rows[split == "eval" :][:1]]})
        with pytest.raises(DataError, match="record 2 .*record 1"):
            FolderDataset(faulty)


def test_references_are_joined_by_instruction(tmp_path):
    questions = [{"instruction": f"Q{i}", "input": "i" * (i % 2)} for i in range(6)]
    answers = [{**row, "output": row["instruction"].lower(), "generator": "r"} for row in questions]
    folder = make_folder(tmp_path, eval=None, eval_instructions=questions, davinci003=answers[::-1])
    assert FolderDataset(folder).references("eval") == tuple(f"q{i}" for i in range(6))

    make_folder(tmp_path, eval=None, davinci003=[*answers[:2], *answers[3:]])
    with pytest.raises(DataError, match=r"davinci003\.json: .*1: 'Q2'"):
        FolderDataset(folder)
    make_folder(tmp_path, eval=None, davinci003=[*answers, answers[1], {"instruction": "Q9", "output": ""}])
    with pytest.raises(DataError, match=r"(?s)record 7 field 'instruction'.*record 8 field 'instruction'.*'Q9'"):
        FolderDataset(folder)


def test_ambiguous_and_empty_folders(tmp_path):
    folder = make_folder(tmp_path / "two")
    (folder / "eval.jsonl").write_text(json.dumps(FILES["eval"][0]))
    with pytest.raises(DataError, match=r"'eval\.json' and 'eval\.jsonl'"):
        FolderDataset(folder)
    (folder / "eval.jsonl").unlink()
    make_folder(folder, eval_instructions=FILES["eval"])
    with pytest.raises(DataError, match="split 'eval'"):
        FolderDataset(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="sft, preference"):
        FolderDataset(tmp_path / "none")


def test_paths_are_never_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(data.load, "_load_hub", pytest.fail)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.csv").write_text("instruction,output\n")
    there = ("data/rows.csv", "data")
    for name in (*there, "other/rows.jsonl", "other/rows.csv", "data/none", "./a", "../a/b", "~/a", Path("other/a")):
        with pytest.raises(DataError, match="expected .*json"):
            load_dataset(name)


def test_load_dataset_explains_names_that_are_none(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name, error, fact in (
        (tmp_path / "nowhere", DataError, "nowhere"),
        ("sandbx", UnknownNameError, "'sandbox'.*folder"),
        ("someone/something", DataError, "pip install datasets"),
        (3, DataError, "got 3"),
    ):
        with pytest.raises(error, match=fact):
            load_dataset(name)


def fake_datasets(monkeypatch, answer, configs=("default",)):
    fake = types.SimpleNamespace(load_dataset=answer, get_dataset_config_names=lambda *_, **__: configs)
    monkeypatch.setitem(sys.modules, "datasets", fake)


def test_hub_datasets_keep_the_splits_they_name(monkeypatch):
    rows = {"eval": FILES["eval"], "sft": FILES["sft"], "other": [{"anything": 1}]}
    by_config = {None: rows, "eval": {"eval": rows["eval"]}, "sft": {"sft": rows["sft"]}}
    known = {("someone/something", "abc", config): found for config, found in by_config.items()}
    for configs in (("default", "other"), ("eval", "other", "sft")):
        fake_datasets(monkeypatch, lambda name, config, revision: known[name, revision, config], configs)
        dataset = HubDataset("someone/something", revision="abc")
        assert dataset.splits == ("sft", "eval")
        assert dataset.references("eval") == ("g",)


def test_alpacafarm_is_read_from_its_parquet_copy(monkeypatch):
    asked = []

    def answer(kind, data_files, split):
        assert (kind, split) == ("parquet", "train")
        assert data_files.startswith("hf://datasets/tatsu-lab/alpaca_farm@refs%2Fconvert%2Fparquet/")
        asked.append(data_files)
        return FILES[data_files.split("/")[-2]]

    fake_datasets(monkeypatch, answer)
    assert HubDataset("tatsu-lab/alpaca_farm").splits == ("sft", "preference", "unlabeled", "val", "eval")
    assert len(asked) == 5
    assert "/alpaca_noisy_multi_preference/preference/" in asked[1]


def test_hub_failures_and_foreign_splits(monkeypatch):
    fake_datasets(monkeypatch, lambda *args, **kwargs: {"other": []})
    with pytest.raises(DataError, match=r"sft.*\['other'\]"):
        HubDataset("a/b")

    def offline(*args, **kwargs):
        raise ConnectionError("offline")

    fake_datasets(monkeypatch, offline)
    with pytest.raises(DataError, match=r"a/b: .*ConnectionError: offline"):
        HubDataset("a/b")


QUESTIONS = [{"index": i, "instruction": f"Q{i}", "input": "in" * (i % 2), "dataset": "koala"} for i in range(4)]
TEXTS = ["Q0", "Q1\n\nin", "Q2", "Q3\n\nin"]
REFERENCES = ["r0", "r1", "r2", "r3"]
OUTPUTS = {"good": ["same", "g1", "g2", "r3"], "bad": ["same", "b1", "b2", "b3"], "unjudged": list("abcd")}
CREDITS = {"good": [1, 1, None, 0.5], "bad": [0, 0, 1]}


def rows_of(responses, generator):
    return [{**row, "output": text, "generator": generator} for row, text in zip(QUESTIONS, responses, strict=True)]


def make_bundle(path, *, pin=True, **changes):
    """A small folder of recorded judgements; `changes` replace the rows of files ("outputs/outputs_bad" as well)."""
    judgements = [
        {"index": index, "generator": generator, "preference": credit}
        for generator, credits in CREDITS.items()
        for index, credit in enumerate(credits)
    ]
    files = {
        "eval_instructions": QUESTIONS,
        "davinci003": rows_of(REFERENCES, "ref-model"),
        "preferences_some_judge": judgements,
        **{f"outputs/outputs_{name}": rows_of(responses, name) for name, responses in OUTPUTS.items()},
        **changes,
    }
    (path / "outputs").mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        if rows is not None:
            (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if pin:
        (path / "recorded.json").write_text(json.dumps({"reference_sha256": reference_digest(TEXTS, REFERENCES)}))
    return path


def test_what_a_folder_of_judgements_holds(tmp_path):
    dataset = load_dataset(make_bundle(tmp_path))
    assert isinstance(dataset, RecordedDataset)
    assert (dataset.level, dataset.judge, dataset.reference) == ("recorded", "some_judge", "ref-model")
    assert dataset.instructions("eval") == tuple(TEXTS)
    assert dataset.references("eval") == tuple(REFERENCES)
    assert dataset.generators == ("bad", "good", "unjudged")
    assert dataset.judged == ("bad", "good")
    assert dataset.outputs("good") == tuple(OUTPUTS["good"])
    np.testing.assert_array_equal(dataset.judgements("good"), [1, 1, np.nan, 0.5])
    np.testing.assert_array_equal(dataset.judgements("bad"), [0, 0, 1, np.nan])  # the last was never judged


def test_the_order_of_lines_does_not_matter(tmp_path):
    first = RecordedDataset(make_bundle(tmp_path / "a"))
    changes = {
        "davinci003": rows_of(REFERENCES, "ref-model")[::-1],
        "outputs/outputs_good": rows_of(OUTPUTS["good"], "good")[::-1],
    }
    shuffled = RecordedDataset(make_bundle(tmp_path / "b", eval_instructions=QUESTIONS[::-1], **changes))
    assert shuffled.recorded_verdicts("good").keys() == first.recorded_verdicts("good").keys()
    np.testing.assert_array_equal(shuffled.judgements("good"), first.judgements("good")[::-1])


def test_verdicts_belong_to_texts(tmp_path):
    dataset = RecordedDataset(make_bundle(tmp_path))
    verdicts = dataset.recorded_verdicts()
    assert verdicts["Q1\n\nin", "g1"] == 1
    assert verdicts["Q2", "b2"] == 1
    assert math.isnan(verdicts["Q2", "g2"])  # judged, not parsed
    assert math.isnan(verdicts["Q0", "same"])  # judged twice, differently
    assert verdicts["Q0", "r0"] == 0.5
    assert ("Q0", "never judged") not in verdicts
    assert ("Q0", "a") not in verdicts
    assert dataset.recorded_verdicts("good")["Q0", "same"] == 1
    assert dataset.recorded_verdicts("bad")["Q0", "same"] == 0
    assert ("Q2", "b2") not in dataset.recorded_verdicts("good")

    # A verdict beside one that was not parsed decides.
    same = {"outputs/outputs_bad": rows_of(["x", "b1", "g2", "b3"], "bad")}
    assert RecordedDataset(make_bundle(tmp_path, **same)).recorded_verdicts()["Q2", "g2"] == 1
    with pytest.raises(UnknownNameError, match="'goood'.*'good'"):
        dataset.outputs("goood")
    with pytest.raises(UnknownNameError, match="unjudged"):
        dataset.judgements("unjudged")


def test_another_reference_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="sha256 a4079dcd"):
        RecordedDataset(make_bundle(tmp_path / "unpinned", pin=False))
    changed = rows_of([*REFERENCES[:3], "r3 "], "ref-model")
    with pytest.raises(DataError, match=r"davinci003\.jsonl: .*sha256"):
        RecordedDataset(make_bundle(tmp_path / "changed", davinci003=changed))
    broken = make_bundle(tmp_path / "broken")
    (broken / "recorded.json").write_text("{}")
    with pytest.raises(DataError, match="reference_sha256"):
        RecordedDataset(broken)


def judgement(**changes):
    return {"index": 0, "generator": "good", "preference": 1, **changes}


@pytest.mark.parametrize(
    ("rows", "fact"),
    [
        ([judgement(index=9)], "record 1 field 'index'.* 9"),
        ([judgement()] * 2, "record 2 .* 0 again"),
        ([judgement(preference=2)], ".0, 1. .* 2"),
        ([judgement(preference=10**400)], r".0, 1. .* 1000\d*\.\.\.0"),
        ([{"index": 0, "generator": "good"}], "'preference'.*missing"),
        ([judgement(index=True)], "field 'index'.* True"),
        ([judgement(generator="who")], "who"),
    ],
)
def test_faulty_judgements(tmp_path, rows, fact):
    with pytest.raises(DataError, match=fact):
        RecordedDataset(make_bundle(tmp_path, preferences_some_judge=rows))


def test_faulty_folders(tmp_path):
    with pytest.raises(DataError, match=r"\['preferences_other', 'preferences_some_judge'\]"):
        RecordedDataset(make_bundle(tmp_path / "two", preferences_other=[]))
    repeated = [*QUESTIONS[:3], {**QUESTIONS[3], "index": 0}]
    with pytest.raises(DataError, match="index .* 1 repeated"):
        RecordedDataset(make_bundle(tmp_path / "repeated", eval_instructions=repeated))
    rows = rows_of(OUTPUTS["bad"], "bad")[:3]
    dataset = RecordedDataset(make_bundle(tmp_path / "short", **{"outputs/outputs_bad": rows}))
    with pytest.raises(DataError, match=r"outputs_bad\.jsonl: .*1: 'Q3"):
        dataset.outputs("bad")


def test_the_hash_covers_what_a_replay_reads(tmp_path):
    first = RecordedDataset(make_bundle(tmp_path / "a")).sha256
    assert RecordedDataset(make_bundle(tmp_path / "b")).sha256 == first
    changes = {"outputs/outputs_bad": rows_of(["x", "b1", "b2", "b3"], "bad")}
    assert RecordedDataset(make_bundle(tmp_path / "c", **changes)).sha256 != first
