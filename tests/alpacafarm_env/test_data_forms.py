"""Rows of other libraries: what is exported reads back to the same records, and what fits no kind of row is named."""

import pytest
from command_files import write

from alpacafarm_env.cli.export import export_split, split_records
from alpacafarm_env.data import FolderDataset, load_dataset
from alpacafarm_env.errors import DataError
from alpacafarm_env.instructions import Preference
from alpacafarm_env.sandbox import SANDBOX

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
        write(tmp_path / f"{name}.json", rows)
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


@pytest.mark.parametrize("form", ["trl", "alpacafarm"])
def test_the_sandboxs_references_read_back(tmp_path, form):
    export_split(form, dataset="sandbox", split="eval", to="jsonl", out=tmp_path)
    again = load_dataset(tmp_path)
    assert again.references("eval") == SANDBOX.references("eval")
    assert list(map(told, again.instructions("eval"))) == list(map(told, SANDBOX.instructions("eval")))


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


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
    write(tmp_path / f"{split}.jsonl", rows)
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
    ]
    assert {
        (each.instruction, each.instruction.system) for each in read(tmp_path, "preference", pairs).preferences()
    } == {("S\n\nQ", "S")}


def test_references_may_be_rows_of_other_libraries(tmp_path):
    write(tmp_path / "eval.json", [{"prompt": "Q"}, {"prompt": "R"}])
    write(tmp_path / "davinci003.json", [{"prompt": "R", "completion": "r"}, {"messages": CHAT}])
    assert FolderDataset(tmp_path).references("eval") == ("a", "r")


@pytest.mark.parametrize(
    ("split", "row", "facts"),
    [
        ("sft", {"question": "Q", "answer": "a"}, ["question, answer", "messages", "output"]),
        ("sft", {"messages": [user("Q"), system("s"), answer("a")]}, ["'messages'", "['user', 'system', "]),
        ("sft", {"messages": [system("s"), *CHAT], "system": "t"}, ["'messages'", "['system', 'user', "]),
        ("sft", {"messages": [*CHAT, user("Q2"), answer("a2")]}, ["'messages'", "'assistant', 'u", "split them"]),
        ("sft", {"conversations": said("Q", "a", roles=("human", "tool"))}, ["'conversations'", "'tool'"]),
        ("sft", {"conversations": [{"from": "human", "content": "Q"}]}, ["'conversations'"]),
        ("sft", {"prompt": "Q", "completion": "a", "label": False}, ["'label'", "KTO", "got False"]),
        ("sft", {"messages": CHAT, "label": 0}, ["'label'", "KTO", "got 0"]),
        ("sft", {"instruction": "Q", "output": "a", "kto_tag": "False"}, ["'kto_tag'", "KTO"]),
        ("sft", {"messages": [answer("a")]}, ["'messages'", "['assistant']"]),
        ("sft", {"messages": []}, ["'messages'", "[]"]),
        ("sft", {"messages": [user("Q"), {"role": "assistant", "content": ["a"]}]}, ["'messages'"]),
        ("sft", {"prompt": 3, "completion": "a"}, ["'prompt'", "got 3"]),
        ("sft", {"prompt": "Q", "completion": [user("a")]}, ["'completion'", "('user', 'a')"]),
        ("sft", {"prompt": "Q", "completion": "\ud800"}, ["'completion'", r"\ud800"]),
        ("sft", {"prompt": "Q\n\nx", "completion": "a", "input": "y"}, ["'input'", "'y'"]),
        ("sft", {"prompt": " ", "completion": "a"}, ["'instruction'", "non-empty"]),
        ("sft", {"prompt": "Q"}, ["'output'", "missing"]),
        ("preference", {"chosen": "a", "rejected": "b"}, ["'prompt'", "missing"]),
        ("preference", {"prompt": "Q", "chosen": "a"}, ["'rejected'", "missing"]),
        ("preference", {"prompt": "Q", "chosen": None, "rejected": "b"}, ["'chosen'", "got null"]),
        ("preference", {"prompt": "Q", "completion": "a", "label": False}, ["'label'", "KTO"]),
        ("preference", {"prompt": "R", "chosen": CHAT, "rejected": "b"}, ["'chosen'", "'Q'"]),
        ("preference", {"chosen": CHAT, "rejected": [user("R"), answer("b")]}, ["'rejected'", "'R'"]),
        ("preference", {"prompt": "Q", "chosen": [user("Q")], "rejected": "b"}, ["'chosen'", "answer"]),
        ("preference", {"prompt": "Q", "chosen": "a", "rejected": "b", "preference": 3}, ["'preference'", "got 3"]),
    ],
)
def test_faulty_rows_are_one_error_each(tmp_path, split, row, facts):
    rows = {"sft": DEMONSTRATIONS[0], "preference": PREFERENCES[0]}
    with pytest.raises(DataError) as caught:
        read(tmp_path, split, [rows[split], row])
    text = str(caught.value)
    assert all(fact in text for fact in [f"{split}.jsonl: 1 ", "record 2", *facts]), text
    assert text.count("\n") == 1
