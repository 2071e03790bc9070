"""Files for the tests of the commands, how they are run, and people who annotate."""

import gzip
import json
import time

from alpacafarm_env.__main__ import main
from alpacafarm_env.human.session import Session
from alpacafarm_env.human.store import Store
from alpacafarm_env.human.tasks import PAIRS, load_tasks


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


SCRIPT = "<script>alert(1)</script>"
LONG_AGO = f"{time.time() - 60:.1f}"


MARKDOWN = """# A plan

**Bold**, *leaning* and `code`, but 2*3*4, a_b_c and <b>no HTML</b>.

3. third
   - nested
4. fourth

```python
# no title
x = "**no bold**"
```

| a | b |
|---|---|
"""
HOSTILE = "\n".join(
    [
        SCRIPT,
        "<img src=//evil.example/x onerror=alert(1)>",
        "[x](javascript:alert(1)) ![x](http://evil.example/x.png) <http://evil.example>",
        "| " + "wide | " * 900,
        *(" " * n + "- deep" for n in range(60)),
        *("*" * 999, "`" * 999, "**" + "a*" * 999, "# " * 99, "9" * 99 + ". x", "x" * 9_000),
        "```" + SCRIPT,
        f"never closed {SCRIPT}",
    ]
)


def human_pairs(num, **more):
    """Pairs with an input now and then and a field of their own; output_1 says "left n", output_2 "right n"."""
    rows = [{"id": n, "instruction": f"Ask {n}", "output_1": f"left {n}", "output_2": f"right {n}"} for n in range(num)]
    return [{**row, **({"input": f"in {n}"} if n % 3 == 0 else {}), **more} for n, row in enumerate(rows)]


def qualification(num=10):
    """Pairs whose key is output_1."""
    return [{**row, "instruction": f"Test {n}", "preference": 1} for n, row in enumerate(human_pairs(num))]


def open_session(tmp_path, pairs, key=(), name="labels", form=PAIRS):
    """A session over files of these records."""
    loaded = load_tasks(write(tmp_path / "pairs.json", pairs), form)
    tests = load_tasks(write(tmp_path / "key.json", key), form, key=True) if key else []
    return Session(Store(tmp_path / f"{name}.sqlite"), loaded, tests)


def judge(session, name, better, slightly=False, seconds=10.0):
    """Answers the pair that is the annotator's now, so that `better` (1 or 2) is the better output."""
    standing = session.standing(name)
    first = better == standing.shown_first
    choice = (2 if slightly else 1) if first else (3 if slightly else 4)
    assert session.answer(name, standing.pair.key, seconds, choice=choice) == ""
    return standing.pair


def undo(session, name):
    """As the page does: from what is shown now."""
    pair = session.standing(name).pair
    return session.undo(name, pair.key if pair else "", 9.0)


class Page:
    """A browser with forms alone, which follows redirects."""

    def __init__(self, session):
        from starlette.testclient import TestClient

        from alpacafarm_env.human.page import MAX_BODY, make_app
        from alpacafarm_env.judge_server.http import Guard

        self.session = session
        self.root = f"/{session.store.token}/"
        app = Guard(make_app(session, f"Guideline {SCRIPT}"), max_body=MAX_BODY)
        self.client = TestClient(app, base_url="http://localhost")

    def get(self, path, **query):
        return self.client.get(self.root + path, params=query)

    def work(self, name="Ann"):
        return self.get("work", name=name).text

    def post(self, path, *, name="Ann", since=LONG_AGO, **fields):
        pair = self.session.standing(name).pair
        data = {"name": name, "since": since, **({"pair": pair.key} if pair else {}), **fields}
        return self.client.post(self.root + path, data=data)


def run(monkeypatch, *args, act=lambda server: None):
    """The command's exit status; `act` is done while it serves."""

    def serve(start, **where):
        with start() as server:
            act(server)
        return 0

    monkeypatch.setattr("alpacafarm_env.judge_server.http.serve", serve)
    return main(["annotate-human", *map(str, args), "--port", "0"])
