"""Live judges: measured by the same figures, one study for each judge that answers differently, one ledger."""

import json

import numpy as np
import pytest
import written
from annotator_worlds import Fake, make_assets, run, shut_off
from faulty_server import Faults, FaultyJudgeServer

from alpacafarm_env.annotators.analysis import COST
from alpacafarm_env.benchmarks.annotators import command as annotators
from alpacafarm_env.benchmarks.annotators.live import LivePool
from alpacafarm_env.benchmarks.annotators.rows import TARGETS, rows_of
from alpacafarm_env.errors import BudgetExceededError, LedgerError
from alpacafarm_env.judge_server.server import JudgeServer
from alpacafarm_env.llm.ledger.operations import spending


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No server but a test's own, and the sandbox's judges are not measured."""
    shut_off(monkeypatch, tmp_path)
    rows = rows_of("human", [{"agreement": np.ones(40)}], "sandbox")
    monkeypatch.setattr(annotators, "judge_rows", lambda judge, question: rows if judge == "human" else [])


@pytest.fixture
def answer(monkeypatch):
    """Makes every pool's judge a `Fake`; the ledgers that the judges got."""
    opened = []

    def set_answer(fails=None):
        def judge_of(self, seed, *, ledger, on_progress=None):
            if on_progress:  # else it is made to be checked, and not asked
                opened.append(ledger)
            return Fake(seed, fails)

        monkeypatch.setattr(LivePool, "judge_of", judge_of)
        return opened

    return set_answer


def live(*more, url="http://127.0.0.1:9/v1"):
    return ("--base-url", url, "--pairs", "20", *more)


def test_a_live_judge_is_measured_by_the_same_figures(assets, tmp_path, answer, capsys):
    opened = answer()
    assert run(assets, tmp_path, *live("--ledger", str(tmp_path / "given.sqlite"))) == 0
    assert [ledger.path.name for ledger in opened] == ["given.sqlite"] * 4
    assert len(set(map(id, opened))) == 1
    with pytest.raises(LedgerError, match="is closed"):
        opened[0].do(spending)
    rows = {(row["judge"], row["figure"]): row for row in written.rows_of(tmp_path) if row["level"] == "live"}
    assert {judge for judge, _ in rows} == {"live alpaca_farm", "live ann", "live bob"}
    pool = {figure: float(row["value"]) for (judge, figure), row in rows.items() if judge == "live alpaca_farm"}
    assert (pool["prefers_first"], pool["variance"], pool["agreement"], pool[COST]) == (1, 1, 0.5, pytest.approx(2))
    assert pool["no_verdict"] == pytest.approx(1 / 20)
    assert pool["spent_usd"] == pytest.approx(4 * 19 * 0.002)
    assert rows["live alpaca_farm", "variance"]["paper"] == "0.26"
    within = {figure: row["within"] for (_, figure), row in rows.items() if row["within"]}
    longer, lists = (str(TARGETS["sim_eval"][f"prefers_{x}"].holds(pool[f"prefers_{x}"])) for x in ("longer", "lists"))
    assert within == {"agreement": "False", "variance": "False", "prefers_longer": longer, "prefers_lists": lists}
    assert int(rows["live bob", "prefers_first"]["n"]) == 10
    printed = capsys.readouterr().out
    assert "$0.1520" in printed
    # One line for each annotator, with the number of pairs.
    assert [line.split()[0] for line in printed.splitlines() if "(10)" in line or "(9)" in line] == ["ann", "bob"]
    assert json.loads((tmp_path / "manifest.json").read_text())["facts"]["live"]["host"] == "127.0.0.1:9"


def test_a_live_judge_that_ends_leaves_the_others_and_status_1(assets, tmp_path, answer, capsys):
    answer(BudgetExceededError("$1 of $1 spent"))
    assert run(assets, tmp_path, *live("--budget-usd", "1", "--models", "openai")) == 1
    assert {row["level"] for row in written.rows_of(tmp_path)} == {"sandbox"}
    told = capsys.readouterr()
    assert "$1 of $1 spent" in told.err
    assert "Traceback" not in told.err
    assert "FAILED: $1 of $1 spent" in told.out
    assert "FAILED: $1 of $1 spent" in (tmp_path / "report.html").read_text(encoding="utf-8")
    answer()
    assert run(assets, tmp_path, *live("--budget-usd", "1", "--models", "openai")) == 0
    assert {row["level"] for row in written.rows_of(tmp_path)} == {"sandbox", "live"}


def test_an_address_with_a_password_is_refused_and_written_nowhere(assets, tmp_path, capsys):
    assert run(assets, tmp_path, *live(url="http://someone:canary@127.0.0.1:9/v1")) == 2
    told = capsys.readouterr()
    assert "base_url must look like" in told.err
    assert "canary" not in told.err + told.out
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"canary" in path.read_bytes()]


def write_pool(folder, *, said="Which is better?", temperature="1.0", comment=""):
    parts = f"[{{user: {said!r}}}, {{items: true}}]"
    asked = f"{{name: asked, format: label, layout: chat, parts: {parts}}}"
    (folder / "asked.yaml").write_text(asked, encoding="utf-8")
    member = f"{{name: only, role: gpt4, prompt: ./asked.yaml, max_tokens: 9, temperature: {temperature}}}"
    pool = f"{comment}\nname: mine\nannotators: [{member}]\n"
    (folder / "pool.yaml").write_text(pool, encoding="utf-8")


def test_what_changes_the_answers_is_another_study(tmp_path):
    """A cell that is done is not measured again, so its name has to tell of everything that its figures hang on."""
    models, pool = tmp_path / "models.yaml", str(tmp_path / "pool.yaml")
    digests = []
    for prompt, model in (({}, "one"), ({}, "two"), ({"said": "And now?"}, "one"), ({"temperature": "0.5"}, "one")):
        write_pool(tmp_path, **prompt)
        models.write_text(f"model: {model}\n", encoding="utf-8")
        digests.append(LivePool("http://127.0.0.1:9/v1", pool, str(models)).digest())
    assert len(set(digests)) == 4
    write_pool(tmp_path, comment="# the same in other words")
    assert LivePool("http://127.0.0.1:9/v1", pool, str(models)).digest() == digests[0]
    named = [LivePool(f"http://127.0.0.1:{port}/v1", name).digest() for port in (8, 9) for name in ("eval", "ann")]
    assert len({*named, *digests}) == 8


@pytest.mark.parametrize(
    ("url", "more", "said"),
    [
        ("http://127.0.0.1:9/v1", ("--pool", "evl"), "Unknown pool 'evl'"),
        ("http://127.0.0.1:9/v1", ("--models", "sandbx"), "Did you mean 'sandbox'?"),
        ("http://127.0.0.1:9/v1", ("--models", "MODELS"), "Unknown role 'chatgtp'. Did you mean 'chatgpt'?"),
        ("http://127.0.0.1:9/v1", ("--models", "openai", "--model", "m"), "Give models or model, not both"),
        ("http://127.0.0.1:9/v1", ("--ledger", "."), "ledger"),
        ("http://127.0.0.1:9/v1", ("--api-key-env", "sk-canary"), "--api-key-env: expected the name"),
        ("http://example.org/v1", (), "base_url is http:// to example.org"),
        ("https://example.org/v1", (), "example.org has no key"),
        ("http://example.org/v1", ("--allow-insecure",), "example.org has no key"),
    ],
)
def test_what_can_be_known_before_is_told_in_one_line(assets, tmp_path, monkeypatch, capsys, url, more, said):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(annotators, "judge_rows", lambda *_: pytest.fail("measured"))
    models = tmp_path / "models.yaml"
    models.write_text("gpt4: a\nchatgtp: b\ndavinci003: c\n", encoding="utf-8")
    given = [str(models) if word == "MODELS" else word for word in more]
    assert run(assets, tmp_path / "out", *live(*given, url=url)) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == (3 if "MODELS" in more else 1)
    assert "canary" not in told.err + told.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [("--api-key", "sk-canary"), ("--api_key=sk-canary",)])
def test_a_key_among_the_options_is_not_printed(assets, tmp_path, capsys, given):
    assert run(assets, tmp_path, *live(*given)) == 2
    told = capsys.readouterr()
    assert "a key is never an argument" in told.err
    assert "canary" not in told.err + told.out


def test_options_of_a_live_judge_need_its_address(assets, tmp_path, capsys):
    assert run(assets, tmp_path / "out", "--model", "m", "--pool", "eval") == 2
    assert "--pool, --model: expected with --base-url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pool", "like"),
    [("alpaca_farm", "sim_eval"), ("eval", "sim_eval"), ("ann", "sim_ann"), ("greedy", "sim_gpt4"), ("weighted", "")],
)
def test_a_pool_stands_beside_the_judge_of_the_paper_with_its_structure(pool, like):
    assert LivePool("http://127.0.0.1:9/v1", pool).like == like


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"api_key": "right"}, "the server refused the key"),
        (
            {"faults": Faults({"content_filter": 1.0})},
            "expected verdicts, got none for any of the pairs. The first says",
        ),
    ],
)
def test_what_fails_while_asking_is_told_in_one_line_and_the_rest_is_written(
    assets, tmp_path, monkeypatch, capsys, server, said
):
    monkeypatch.setenv("OPENAI_API_KEY", "canary-of-a-key")
    with FaultyJudgeServer(**server) as serving:
        where = ("--base-url", serving.base_url, "--models", "sandbox", "--ledger", str(tmp_path / "ledger.sqlite"))
        assert run(assets, tmp_path / "out", *where, "--pairs", "4") == 1
    told = capsys.readouterr()
    assert "FAILED: " in told.out
    assert said in told.out
    assert "Traceback" not in told.err
    assert "canary" not in told.err + told.out
    assert {row["level"] for row in written.rows_of(tmp_path / "out")} == {"sandbox"}


def test_the_real_pool_is_measured_through_the_judge_server(assets, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with JudgeServer() as server:
        where = ("--base-url", server.base_url, "--models", "sandbox", "--ledger", str(tmp_path / "ledger.sqlite"))
        assert run(assets, tmp_path / "out", *where, "--pairs", "40") == 0
    found = {(row["judge"], row["figure"]): row for row in written.rows_of(tmp_path / "out")}
    pool = found["live alpaca_farm", "agreement"]
    assert (pool["level"], int(pool["n"])) == ("live", 40)
    assert 0.5 < float(pool["value"]) < 0.9
    assert float(found["live alpaca_farm", "no_verdict"]["value"]) == 0
    assert pool["paper"] == "0.65"
