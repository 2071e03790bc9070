"""Formats, row kinds and the promise that every faulty row of a file is named in one error."""

import gzip
import json
import random
import re
import sys

import pytest

from alpacafarm_env.data.files import SUFFIXES, read_records, stem_of
from alpacafarm_env.data.schema import KINDS, PREFERENCE, check_rows, kind_of
from alpacafarm_env.errors import DataError

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
        ("a.json", "[{", "syntax"),
        ("a.json", '{"instruction": "x"}', "list .*dict"),
        ("a.json", "[" * 100_000, "nested"),
        ("a.json", json.dumps(ROWS).encode("utf-16"), "UTF-8.* 0xff at offset 0"),
        ("a.parquet", b"PAR1 not really", "Parquet"),
        *(("a.json.gz", damage, "gzip") for damage in ("cut", "plain", "middle")),
        ("a.json", None, "FileNotFoundError"),
    ],
)
def test_damaged_and_missing_files_are_named(tmp_path, name, content, fact):
    path = tmp_path / name
    if fact == "gzip":
        whole = gzip.compress(json.dumps(ROWS).encode())
        path.write_bytes({"cut": whole[:-10], "plain": b"plain"}.get(content, whole[:30] + bytes(20) + whole[50:]))
    elif content is not None:
        write(path, content)
    with pytest.raises(DataError, match=fact) as error:
        read_records(path)
    assert name in str(error.value)


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("alpacafarm_env.data.files.MAX_BYTES", 1000)
    with pytest.raises(DataError, match="1000 bytes"):
        read_records(write(tmp_path / "a.json.gz", " " * 1001))


def test_parquet_without_pyarrow_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        read_records(write(tmp_path / "a.parquet", b""))


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


def test_defaults_and_further_fields():
    row = {"instruction": "a", "output": "b", "price": 3}
    assert check_rows([row], KINDS["demonstration"], "x") == [
        {"instruction": "a", "input": "", "system": "", "output": "b", "generator": "", "dataset": ""}
    ]


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
