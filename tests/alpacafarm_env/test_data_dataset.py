"""Folders and hub datasets: splits, references, guards against overlap, names that do not exist."""

import copy
import json
import sys
import types

import pytest

from alpacafarm_env.data import Dataset, FolderDataset, HubDataset, load_dataset
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


def test_a_folder_serves_every_kind(tmp_path):
    dataset = FolderDataset(make_folder(tmp_path))
    assert isinstance(dataset, Dataset)
    assert dataset.level == "live"
    assert dataset.splits == ("sft", "preference", "unlabeled", "val", "eval")
    assert dataset.instructions("unlabeled") == ("Say e.", "Say e.\n\ntwice")
    assert dataset.instructions("unlabeled") is dataset.instructions("unlabeled")
    demonstration = dataset.demonstrations()[1]
    assert demonstration == Demonstration(Instruction("Say b.", "x"), "b")
    assert (demonstration.instruction.id, demonstration.instruction.split_name) == (1, "sft")
    assert dataset.references("eval") == ("g",)
    assert dataset.instructions("eval")[0].source == "koala"
    assert dataset.samples("val") == (("f", "F"),)


def test_several_pairs_for_one_instruction(tmp_path):
    dataset = FolderDataset(make_folder(tmp_path))
    assert dataset.instructions("preference") == ("Say c.", "Say d.")
    assert [i.id for i in dataset.instructions("preference")] == [0, 1]
    pairs = dataset.preferences()
    assert [(str(p.instruction), p.responses, p.preference) for p in pairs] == [
        ("Say c.", ("c", "d"), 1),
        ("Say d.", ("c", "d"), 2),
        ("Say c.", ("c", "e"), 1),
    ]
    assert (pairs[1].chosen, pairs[1].rejected) == ("d", "c")


def test_unknown_splits_and_unfit_kinds(tmp_path):
    dataset = FolderDataset(make_folder(tmp_path))
    with pytest.raises(UnknownNameError, match="Did you mean 'eval'"):
        dataset.instructions("evl")
    with pytest.raises(DataError, match=r"unlabeled\.json: references need demonstration rows .*got instruction rows"):
        dataset.references("unlabeled")
    with pytest.raises(DataError, match="preferences need preference rows"):
        dataset.preferences("sft")


def test_an_instruction_in_two_splits_is_an_error_that_names_both_records(tmp_path):
    folder = make_folder(tmp_path, eval=[{"instruction": "New."}, {"instruction": "Say b.", "input": "x"}])
    with pytest.raises(DataError) as error:
        FolderDataset(folder)
    assert "eval.json: 1 faulty record" in str(error.value)
    assert "record 2 field 'instruction': expected no instruction of another split" in str(error.value)
    assert f"that of record 2 of {folder / 'sft.json'}" in str(error.value)
    assert len(FolderDataset(folder, allow_overlap=True).instructions("eval")) == 2


def test_an_instruction_twice_in_a_split_is_an_error(tmp_path):
    folder = make_folder(tmp_path, unlabeled=[{"instruction": "x"}, {"instruction": "y"}, {"instruction": "x"}])
    with pytest.raises(DataError, match=r"record 3 field 'instruction': .* the same instruction as record 1: 'x'"):
        FolderDataset(folder)
    make_folder(tmp_path, unlabeled=None, preference=[FILES["preference"][0]] * 2)
    with pytest.raises(DataError, match=r"record 2 .*the same pair as record 1"):
        FolderDataset(folder)
    assert len(FolderDataset(folder, allow_overlap=True).preferences()) == 2


def test_sft_may_have_several_demonstrations_of_an_instruction(tmp_path):
    rows = [{"instruction": "x", "output": output} for output in ("a", "b")]
    dataset = FolderDataset(make_folder(tmp_path, sft=rows))
    assert [each.response for each in dataset.demonstrations()] == ["a", "b"]
    assert len(dataset.instructions("sft")) == len(dataset.references("sft")) == 2
    for split in ("sft", "eval"):  # the same demonstration, and an instruction that is evaluated, count once
        faulty = make_folder(tmp_path / split, **{split: [rows[0], *rows[split == "eval" :][:1]]})
        with pytest.raises(DataError, match="record 2 .*--allow-overlap.*as record 1"):
            FolderDataset(faulty)


def test_load_dataset_permits_overlap_when_asked(tmp_path):
    folder = make_folder(tmp_path, eval=[{"instruction": "Say b.", "input": "x"}])
    with pytest.raises(DataError, match="--allow-overlap"):
        load_dataset(folder)
    assert load_dataset(folder, allow_overlap=True).instructions("eval") == ("Say b.\n\nx",)


def test_faults_name_file_record_field_found_and_expected(tmp_path):
    folder = make_folder(tmp_path, sft=[FILES["sft"][0], {"instruction": "x", "input": "", "output": None}])
    with pytest.raises(DataError, match=r"sft\.json: .*\n  record 2 field 'output': expected a string .*, got null"):
        FolderDataset(folder)


def test_references_in_a_file_of_their_own_are_joined_by_instruction(tmp_path):
    questions = [{"instruction": f"Q{i}", "input": "i" * (i % 2)} for i in range(6)]
    answers = [{**row, "output": row["instruction"].lower(), "generator": "r"} for row in questions]
    folder = make_folder(tmp_path, eval=None, eval_instructions=questions, davinci003=answers[::-1])
    assert FolderDataset(folder).references("eval") == tuple(f"q{i}" for i in range(6))

    make_folder(tmp_path, eval=None, davinci003=[*answers[:2], *answers[3:]])
    with pytest.raises(DataError, match=r"davinci003\.json: .*none for 1: 'Q2'"):
        FolderDataset(folder)
    make_folder(tmp_path, eval=None, davinci003=[*answers, answers[1], {"instruction": "Q9", "output": ""}])
    with pytest.raises(DataError) as error:
        FolderDataset(folder)
    assert "record 7 field 'instruction': expected an instruction that no other record has" in str(error.value)
    assert "record 8 field 'instruction': expected an instruction of the eval split, got 'Q9'" in str(error.value)


def test_ambiguous_and_empty_folders(tmp_path):
    folder = make_folder(tmp_path / "two")
    (folder / "eval.jsonl").write_text(json.dumps(FILES["eval"][0]))
    with pytest.raises(DataError, match=r"one file for 'eval', got 'eval\.json' and 'eval\.jsonl'"):
        FolderDataset(folder)
    (folder / "eval.jsonl").unlink()
    make_folder(folder, eval_instructions=FILES["eval"])
    with pytest.raises(DataError, match="one file for the split 'eval'"):
        FolderDataset(folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="expected a file named sft, preference"):
        FolderDataset(tmp_path / "none")


def test_load_dataset_takes_folders_once_and_objects_as_they_are(tmp_path):
    folder = make_folder(tmp_path)
    dataset = load_dataset(str(folder))
    assert load_dataset(folder) is dataset
    assert load_dataset(dataset) is dataset
    assert copy.deepcopy(dataset) is dataset
    assert "sft: 2" in repr(dataset)


def test_load_dataset_explains_names_that_are_none(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="no such folder"):
        load_dataset(tmp_path / "nowhere")
    with pytest.raises(UnknownNameError, match="Did you mean 'sandbox'.*folder"):
        load_dataset("sandbx")
    with pytest.raises(DataError, match="pip install datasets"):
        load_dataset("someone/something")
    with pytest.raises(DataError, match="got 3"):
        load_dataset(3)


def fake_datasets(monkeypatch, answer):
    calls = []

    def load(*args, **kwargs):
        calls.append((args, kwargs))
        return answer(*args, **kwargs)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    return calls


def test_hub_datasets_keep_the_splits_they_name(monkeypatch):
    rows = {"eval": FILES["eval"], "sft": FILES["sft"], "train": [{"anything": 1}]}
    calls = fake_datasets(monkeypatch, lambda name, revision: rows)
    dataset = HubDataset("someone/something", revision="abc")
    assert dataset.splits == ("sft", "eval")
    assert dataset.references("eval") == ("g",)
    assert calls == [(("someone/something",), {"revision": "abc"})]


def test_alpacafarms_hub_dataset_is_read_from_its_parquet_copy(monkeypatch):
    def answer(kind, data_files, split):
        assert (kind, split) == ("parquet", "train")
        assert data_files.startswith("hf://datasets/tatsu-lab/alpaca_farm@refs%2Fconvert%2Fparquet/")
        return FILES[data_files.split("/")[-2]]

    calls = fake_datasets(monkeypatch, answer)
    dataset = HubDataset("tatsu-lab/alpaca_farm")
    assert dataset.splits == ("sft", "preference", "unlabeled", "val", "eval")
    assert len(calls) == 5
    assert "/alpaca_noisy_multi_preference/preference/" in calls[1][1]["data_files"]


def test_hub_failures_and_foreign_splits(monkeypatch):
    fake_datasets(monkeypatch, lambda *args, **kwargs: {"train": []})
    with pytest.raises(DataError, match=r"expected splits among sft.*got \['train'\]"):
        HubDataset("a/b")

    def offline(*args, **kwargs):
        raise ConnectionError("offline")

    fake_datasets(monkeypatch, offline)
    with pytest.raises(DataError, match=r"a/b: .*ConnectionError: offline"):
        HubDataset("a/b")
