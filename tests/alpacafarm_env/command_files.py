"""Files for the tests of the commands, and how they run one against a judge server."""

import gzip
import json

from alpacafarm_env.__main__ import main


def make_pairs(num, start=0):
    """Pairs with an input now and then, fields of their own, and every tenth identical."""
    pairs = []
    for n in range(start, start + num):
        row = {"id": n, "instruction": f"Say something about number {n}.", "output_1": f"It is {n}.", "tags": ["ü", n]}
        row["output_2"] = row["output_1"] if n % 10 == 3 else "- a number\n" * (n % 4) + f"Number {n} " * (n % 3 + 1)
        pairs.append({**row, "input": f"a\u2028b {n}"} if n % 3 == 0 else row)
    return pairs


def outputs(num=12, **more):
    """A generator's outputs and the references they meet, in different orders."""
    ours = [{"instruction": f"Question {n}", "input": "i" * (n % 2)} for n in range(num)]
    ours = [{**row, "output": f"answer {n} " * (n % 5 + 1), "generator": "g"} for n, row in enumerate(ours)]
    base = [{**row, "output": f"reference {row['instruction']}", "generator": "base"} for row in ours]
    return [{**row, **more} for row in ours], base[::-1]


def write(path, records):
    lines = [json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines) if path.suffix == ".jsonl" else json.dumps(records))
    return path


def read(path):
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.split("\n") if line] if ".jsonl" in path.name else json.loads(text)


def requests(server):
    return server.stats()["requests"]


def make_call(server, tmp_path, monkeypatch):
    """A function that runs a command against the server, in an empty folder, with a ledger of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ALPACAFARM_DATA", raising=False)
    monkeypatch.setenv("ALPACAFARM_LEDGER", str(tmp_path / "own.sqlite"))

    def call(*args, at=server, ledger="ledger.sqlite"):
        where = ["--base-url", at.base_url, "--models", "sandbox"] if at else []
        return main([*map(str, args), *where, "--ledger", str(tmp_path / ledger)])

    return call
