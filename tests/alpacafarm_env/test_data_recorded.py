"""Recorded judgements: joined by instruction and index, pinned to their reference, never guessed."""

import json
import math

import numpy as np
import pytest

from alpacafarm_env.data import RecordedDataset, load_dataset
from alpacafarm_env.data.recorded import reference_digest
from alpacafarm_env.errors import DataError, UnknownNameError

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
