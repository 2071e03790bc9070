"""Formats, row kinds, other libraries' rows, and the promise that every faulty row is named in one error."""

import gzip
import json
import random
import re

import pytest
from command_files import write as write_rows

from alpacafarm_env.cli.export import export_split, split_records
from alpacafarm_env.data import FolderDataset, load_dataset
from alpacafarm_env.data.files import SUFFIXES, read_records, stem_of
from alpacafarm_env.data.schema import KINDS, PREFERENCE, check_rows, kind_of
from alpacafarm_env.errors import DataError
from alpacafarm_env.instructions import Preference

ROWS = [
    {"instruction": "Name a colour.", "input": "", "output": "Blue,\u2028or red."},
    {"instruction": "Translate.", "input": "chat", "output": ""},
]


def write(path, content):
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def encode(rows, suffix):
    if suffix.startswith(".parquet"):
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        sink = pa.BufferOutputStream()
        parquet.write_table(pa.Table.from_pylist(rows), sink)
        return sink.getvalue().to_pybytes()
    if suffix.startswith(".jsonl"):
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return json.dumps(rows, ensure_ascii=False)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_records(tmp_path, suffix):
    assert read_records(write(tmp_path / f"sft{suffix}", encode(ROWS, suffix))) == ROWS
    assert (stem_of(tmp_path / f"sft{suffix}"), stem_of(tmp_path / "sft.csv")) == ("sft", None)
    records = [{"instruction": "a", "input": None, "output": "b"}, {"instruction": "c", "input": "d", "output": "e"}]
    path = write(tmp_path / f"null{suffix}", encode(records, suffix))
    assert [row["input"] for row in check_rows(read_records(path), KINDS["demonstration"], "x")] == ["", "d"]


def test_a_byte_order_mark_is_no_fault(tmp_path):
    assert read_records(write(tmp_path / "a.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode())) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("a.csv", "a,b", r"\.json.*'a\.csv'"),
        ("a.json", '{"instruction": "x"}', "list .*dict"),
        ("a.json", "[" * 100_000, "nested"),
        ("a.json", json.dumps(ROWS).encode("utf-16"), "UTF-8.* 0xff at offset 0"),
        ("a.parquet", b"PAR1 not really", "Parquet"),
        ("a.json.gz", gzip.compress(b"[]" * 99, mtime=0)[:-10], "gzip"),
        ("a.json", None, "FileNotFoundError"),
    ],
)
def test_damaged_and_missing_files_are_named(tmp_path, name, content, fact):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=fact) as error:
        read_records(path)
    assert name in str(error.value)


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("alpacafarm_env.data.files.MAX_BYTES", 1000)
    with pytest.raises(DataError, match="1000 bytes"):
        read_records(write(tmp_path / "a.json.gz", " " * 1001))


def test_every_faulty_row_is_in_one_error(tmp_path):
    lines = [
        ("", '{"instruction": "fine", "input": "", "output": "yes"}'),
        ("record 2: ", '{"instruction": "cut", "out'),
        ("record 3 field 'instruction': .* ''", '{"instruction": "", "output": "x"}'),
        ("record 4 field 'output': .*missing", '{"instruction": "no output"}'),
        ("record 5: ", "[1, 2]"),
        (r"record 6 field 'input': .* \[\]", '{"instruction": "null", "input": [], "output": null}'),
        ("record 6 field 'output': .* null", None),
        (r"record 7 field 'output': .*'\\ud800'", '{"instruction": "surrogate", "output": "\\ud800"}'),
        ("record 8 field 'output': ", '{"instruction": "number", "output": 1e999}'),
        ("", ""),
        ("record 10 field 'instruction': ", '{"instruction": "", "output": "after a blank line"}'),
    ]
    path = write(tmp_path / "sft.jsonl", "\n".join(line for _, line in lines if line is not None) + "\n")
    with pytest.raises(DataError) as error:
        check_rows(read_records(path), KINDS["demonstration"], str(path))
    first, *rest = str(error.value).split("\n")
    assert first.startswith(f"{path}: 8 faulty records")
    for fault, line in zip([fault for fault, _ in lines if fault], rest, strict=True):
        assert re.match(f"  {fault}", line), (fault, line)


def test_many_faults_are_counted():
    with pytest.raises(DataError) as error:
        check_rows([{}] * 1000, KINDS["instruction"], "x.json")
    first, *rest, last = str(error.value).split("\n")
    assert first.startswith("x.json: 1000 ")
    assert [line.split(" field")[0].strip() for line in rest] == [f"record {number}" for number in range(1, 11)]
    assert "990" in last
    assert "record 1000" in last


def test_an_empty_file_is_an_error(tmp_path):
    for number, content in enumerate(("", "\n", " \n\n\t\r\n")):
        for records in ([], read_records(write(tmp_path / f"{number}.jsonl", content))):
            with pytest.raises(DataError, match=r"x\.json.* record"):
                check_rows(records, KINDS["instruction"], "x.json")


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n \r\n"])
def test_blank_lines_are_no_records_but_count(tmp_path, end):
    text = '{"instruction": "a"}\n\n \t\n{"instruction": "b"}' + end
    rows = check_rows(read_records(write(tmp_path / "a.jsonl", text)), KINDS["instruction"], "x")
    assert [(row["instruction"], row.number) for row in rows] == [("a", 1), ("b", 4)]


def test_preferences_are_1_or_2():
    row = {"instruction": "a", "input": "", "output_1": "b", "output_2": "c"}
    for label in (0, 1.5, 3, True, "1", None, float("nan")):
        with pytest.raises(DataError, match="record 1 field 'preference': .* 1 or 2"):
            check_rows([{**row, "preference": label}], PREFERENCE, "x")
    for label in (1, 2, 1.0, 2.0):
        assert check_rows([{**row, "preference": label}], PREFERENCE, "x")[0]["preference"] == label


def test_any_row_tells_the_kind():
    assert kind_of([{"instruction": "a"}]) == "instruction"
    assert kind_of([{"instruction": "a"}, {"output": "b"}]) == "demonstration"
    assert kind_of([{"instruction": "a", "output": ["b"]}, {"output": ["b"]}, {"output": "c"}]) == "multisample"
    assert kind_of([3, {"instruction": "a"}, {"output_1": "b"}]) == "preference"


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".jsonl.gz", ".parquet"])
def test_damage_gives_valid_rows_or_data_errors(tmp_path, suffix):
    """Bit flips and cuts, 80 a format: nothing but DataError escapes."""
    rng = random.Random(suffix)
    path = tmp_path / f"sft{suffix}"
    whole = write(path, encode(ROWS * 3, suffix)).read_bytes()
    num_refused = 0
    for _ in range(80):
        damaged = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            rows = check_rows(read_records(path), KINDS["demonstration"], str(path))
        except DataError:
            num_refused += 1
        else:
            assert all(isinstance(row["output"], str) for row in rows)
    assert num_refused > 20


ODD = ' Says "a",\r\n\tb\u2028c\x85d </s> \U0001f411\x00e \n\n'
FILES = {
    "sft": [
        {"instruction": ODD, "input": ODD, "output": ODD, "dataset": "koala"},
        {"instruction": "Two\n\nparagraphs", "input": "", "output": ""},
        {"instruction": "Two\n\nparagraphs", "input": "", "output": "Another."},
        {"instruction": "Three", "input": "x", "system": ODD, "output": "Brief."},
    ],
    "preference": [
        {"instruction": "Say c.", "input": "now", "output_1": ODD, "output_2": "d", "preference": 2},
        {"instruction": "Say d.", "input": "", "output_1": "c", "output_2": "", "preference": 1},
        {"instruction": "Say c.", "input": "now", "output_1": "c", "output_2": "e", "preference": 1},
    ],
    "unlabeled": [{"instruction": "Say e."}, {"instruction": "Say e.", "input": ODD}],
    "val": [{"instruction": "Say f.", "input": "", "output": ["f", "F"]}],
    "eval": [{"instruction": "Say g.", "input": "", "output": "g", "generator": "davinci", "dataset": "koala"}],
}


@pytest.fixture
def dataset(tmp_path):
    for name, rows in FILES.items():
        write_rows(tmp_path / f"{name}.json", rows)
    return FolderDataset(tmp_path)


def told(record):
    """All that a record says."""
    ask = getattr(record, "instruction", "") if not hasattr(record, "split_name") else record
    answers = (record.responses, record.preference) if isinstance(record, Preference) else ()
    fields = (ask.instruction, ask.input, ask.id, ask.split_name, ask.source, ask.system)
    return (*fields, *answers, getattr(record, "response", None))


@pytest.mark.parametrize("to", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", ["trl", "alpacafarm"])
def test_exports_read_back_to_the_same_records(dataset, tmp_path, form, to):
    pytest.importorskip("pyarrow")
    for split in dataset.splits:
        (path,) = export_split(form, dataset=dataset, split=split, to=to, out=tmp_path / "out")
        assert path == tmp_path / "out" / f"{split}.{to}"
    again = load_dataset(tmp_path / "out")
    assert again.splits == dataset.splits
    for split in dataset.splits:
        assert list(map(told, split_records(again, split))) == list(map(told, split_records(dataset, split)))
    with pytest.raises(DataError, match=rf"sft\.{to}"):
        export_split(form, dataset=dataset, split="sft", to=to, out=tmp_path / "out")


def message(role):
    return lambda text: {"role": role, "content": text}


user, answer, system = map(message, ("user", "assistant", "system"))


def said(*texts, roles=("human", "gpt")):
    """ShareGPT's messages."""
    return [{"from": role, "value": text} for role, text in zip(roles, texts, strict=True)]


CHAT = [user("Q"), answer("a")]
DEMONSTRATIONS = [
    {"messages": CHAT},
    {"prompt": "Q", "completion": "a"},
    {"prompt": [user("Q")], "completion": [answer("a")], "input": None},
    {"prompt": "Q", "completion": CHAT, "anything": {"else": 1}},
    {"instruction": "Q", "output": "a"},
    {"conversations": said("Q", "a")},
    {"prompt": "Q", "completion": "a", "label": True},
]
SYSTEMS = [
    {"messages": [system("S"), *CHAT]},
    {"prompt": [system("S"), user("Q")], "completion": [answer("a")]},
    {"conversations": said("S", "Q", "a", roles=("system", "human", "gpt"))},
    {"conversations": said("Q", "a"), "system": "S"},
    {"instruction": "Q", "output": "a", "system": "S"},
]
"""The same demonstration after a system text."""
PREFERENCES = [
    {"prompt": "Q", "chosen": "a", "rejected": "b"},
    {"prompt": [user("Q")], "chosen": [answer("a")], "rejected": [answer("b")]},
    {"chosen": CHAT, "rejected": [user("Q"), answer("b")]},
    {"prompt": "Q", "chosen": CHAT, "rejected": [user("Q"), answer("b")], "messages": CHAT, "score_chosen": 1.5},
    {"instruction": "Q", "chosen": "a", "rejected": [answer("b")]},
    {"prompt": "Q", "chosen": "a", "rejected": "b", "preference": 2},
    {"conversations": said("Q", roles=["human"]), "chosen": said("a", roles=["gpt"])[0], "rejected": "b"},
]


def read(tmp_path, split, rows):
    write_rows(tmp_path / f"{split}.jsonl", rows)
    return FolderDataset(tmp_path, allow_overlap=True)


def test_rows_of_other_libraries_are_records(tmp_path):
    demonstrations = read(tmp_path, "sft", DEMONSTRATIONS).demonstrations()
    assert {told(each)[:2] + told(each)[-1:] for each in demonstrations} == {("Q", "", "a")}
    assert len(demonstrations) == len(DEMONSTRATIONS)
    preferences = read(tmp_path, "preference", PREFERENCES).preferences()
    assert [(str(each.instruction), each.chosen, each.rejected) for each in preferences] == [("Q", "a", "b")] * 7
    assert [each.preference for each in preferences] == [1, 1, 1, 1, 1, 2, 1]
    asked = [{"prompt": "P"}, {"messages": [user("Q\n\nx")], "input": "x"}, {"prompt": [user("R")]}]
    instructions = read(tmp_path, "unlabeled", asked).instructions("unlabeled")
    assert [(each.instruction, each.input) for each in instructions] == [("P", ""), ("Q", "x"), ("R", "")]


def test_system_texts_are_part_of_the_instruction(tmp_path):
    demonstrations = read(tmp_path, "sft", SYSTEMS).demonstrations()
    triples = [(each.instruction, each.instruction.system, each.response) for each in demonstrations]
    assert triples == [("S\n\nQ", "S", "a")] * len(SYSTEMS)
    assert {each.instruction.instruction for each in demonstrations} == {"S\n\nQ"}
    pairs = [
        {"prompt": [system("S"), user("Q")], "chosen": "a", "rejected": [answer("b")]},
        {"chosen": [system("S"), *CHAT], "rejected": [system("S"), user("Q"), answer("b")]},
        {"prompt": "Q", "chosen": [system("S"), *CHAT], "rejected": "b"},
        {"prompt": "Q", "system": "S", "chosen": "a", "rejected": "b"},
        {"instruction": "Q", "chosen": [system("S"), answer("a")], "rejected": [system("S"), answer("b")]},
    ]
    found = read(tmp_path, "preference", pairs).preferences()
    told = {(each.instruction, each.instruction.system, each.chosen, each.rejected) for each in found}
    assert told == {("S\n\nQ", "S", "a", "b")}


def test_references_may_be_rows_of_other_libraries(tmp_path):
    write_rows(tmp_path / "eval.json", [{"prompt": "Q"}, {"prompt": "R"}])
    write_rows(tmp_path / "davinci003.json", [{"prompt": "R", "completion": "r"}, {"messages": CHAT}])
    assert FolderDataset(tmp_path).references("eval") == ("a", "r")


@pytest.mark.parametrize(
    ("split", "row", "facts"),
    [
        ("sft", {"question": "Q", "answer": "a"}, ["question, answer", "messages", "output"]),
        ("sft", {"messages": [user("Q"), system("s"), answer("a")]}, ["'messages'", "['user', 'system', "]),
        ("sft", {"messages": [*CHAT, user("Q2"), answer("a2")]}, ["'messages'", "'assistant', 'u", "split them"]),
        ("sft", {"conversations": said("Q", "a", roles=("human", "tool"))}, ["'conversations'", "'tool'"]),
        ("sft", {"prompt": "Q", "completion": "a", "label": False}, ["'label'", "KTO", "got False"]),
        ("sft", {"instruction": "Q", "output": "a", "kto_tag": "False"}, ["'kto_tag'", "KTO"]),
        ("sft", {"messages": [system("S"), *CHAT], "system": "T"}, ["'messages'", "'S'"]),
        ("sft", {"messages": [answer("a")]}, ["'messages'", "['assistant']"]),
        ("sft", {"messages": [user("Q"), {"role": "assistant", "content": ["a"]}]}, ["'messages'"]),
        ("sft", {"prompt": "Q", "completion": "\ud800"}, ["'completion'", r"\ud800"]),
        ("sft", {"prompt": "Q\n\nx", "completion": "a", "input": "y"}, ["'input'", "'y'"]),
        ("preference", {"chosen": "a", "rejected": "b"}, ["'prompt'", "missing"]),
        ("preference", {"prompt": "Q", "chosen": "a"}, ["'rejected'", "missing"]),
        ("preference", {"prompt": "Q", "chosen": None, "rejected": "b"}, ["'chosen'"]),
        ("preference", {"prompt": "Q", "completion": "a", "label": False}, ["'label'", "KTO"]),
        ("preference", {"chosen": CHAT, "rejected": [user("R"), answer("b")]}, ["'rejected'", "'R'"]),
        ("preference", {"prompt": "Q", "chosen": [user("Q")], "rejected": "b"}, ["'chosen'", "answer"]),
        ("preference", {"prompt": CHAT, "chosen": "a", "rejected": "b"}, ["'prompt'", "without an answer"]),
        ("sft", {"prompt": CHAT}, ["'prompt'", "without an answer"]),
        ("sft", {"prompt": "Q", "completion": []}, ["'completion'", "an answer"]),
    ],
)
def test_faulty_rows_are_one_error_each(tmp_path, split, row, facts):
    rows = {"sft": DEMONSTRATIONS[0], "preference": PREFERENCES[0]}
    with pytest.raises(DataError) as caught:
        read(tmp_path, split, [rows[split], row])
    text = str(caught.value)
    assert all(fact in text for fact in [f"{split}.jsonl: 1 ", "record 2", *facts]), text
    assert text.count("\n") == 1
