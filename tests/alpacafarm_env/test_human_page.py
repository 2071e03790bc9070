"""The page that people judge on, and the command that serves it."""

import json
import re
import socket
import sys
import time
import urllib.request
from contextlib import ExitStack
from html import unescape
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from command_files import read, write
from human_pairs import LONG_AGO, SCRIPT, Page, judge, make_pairs, open_session, qualification, run, undo

from alpacafarm_env.__main__ import main
from alpacafarm_env.errors import AlpacaFarmError
from alpacafarm_env.human.pairs import load_pairs
from alpacafarm_env.human.session import Session
from alpacafarm_env.human.store import Store

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from alpacafarm_env.human.server import PageServer
from alpacafarm_env.judge_server import running


@pytest.fixture
def page(tmp_path):
    return Page(open_session(tmp_path, write, make_pairs(4)))


def shown(text):
    """The texts of the responses, in their order on the page."""
    parts = re.findall(r'<section aria-label="Response [AB]">.*?<div class="text" dir="auto">(.*?)</div>', text, re.S)
    return [unescape(part) for part in parts]


def test_a_pair_is_shown_in_its_stored_order_and_the_answer_counts_for_what_was_there(page):
    assert "Begin" in page.get("").text
    for n in range(4):
        standing = page.session.standing("Ann")
        texts = shown(page.work())
        assert texts == list(standing.pair.outputs[:: 1 if standing.shown_first == 1 else -1])
        done = page.post("answer", choice="1")
        assert done.history[0].status_code == 303
        assert f"{n + 1} of 4" in done.text
        assert page.session.store.all()[-1].record[f"output_{standing.shown_first}"] == texts[0]
        assert page.session.store.all()[-1].answer.better == standing.shown_first
    assert shown(page.work()) == []
    assert len(page.session.store.all()) == 4
    page.post("undo")
    assert len(shown(page.work())) == 2
    assert len(page.session.store.all()) == 3


def test_texts_are_text(tmp_path):
    row = {"instruction": f"i{SCRIPT}", "output_1": f"a{SCRIPT}", "output_2": f'b"{SCRIPT}'}
    page = Page(open_session(tmp_path, write, [row]))
    name = f'A"{SCRIPT}'
    for text in (page.work(), page.work(name), page.get("work", name="").text):
        assert SCRIPT not in text
        assert "<script src=" in text
    assert sorted(shown(page.work())) == [row["output_1"], row["output_2"]]


def test_the_guideline_is_shown_before_the_first_pair_and_hides_none(page):
    """A closed <details> takes a line; the open one took a phone's whole screen."""
    assert "Guideline &lt;script&gt;" in page.get("").text
    assert re.search(r'<details class="guideline"\s*>', page.work())


def test_nothing_is_there_without_the_secret(page):
    for path in ("/", "/work?name=Ann", "/x/", "/x/work?name=Ann", f"/{page.root[2:]}", "//", "/page.css"):
        assert page.client.get(path).status_code == 404
    assert page.client.post("/x/answer", data={"name": "Ann"}).status_code == 404
    assert page.session.store.all() == []


def test_the_browser_is_told_to_ask_nobody_else(page):
    for path in ("", "work?name=Ann", "page.css", "page.js", "icon.svg", "pairs.json", "..%2fserver.py"):
        reply = page.client.get(page.root + path)
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert reply.headers["referrer-policy"] == "same-origin"
        assert reply.status_code == (404 if "pairs" in path or "server" in path else 200)
        # Our own files alone, by relative addresses; no style or script within the page.
        assert not re.search(
            r"""https?://(?!www\.w3\.org/2000/svg)|(?:src|href)=["']/|<style|style=|\son\w+=""", reply.text
        )


def test_what_speaks_against_an_answer_is_told_and_it_is_not_stored(page):
    shown, late = page.session.standing("Ann").pair.key, f"{time.time() - 2 * 24 * 3600:.1f}"
    for fields in ({"since": f"{time.time():.3f}"}, {"since": late}, {"since": "-1e308"}, {"since": "0"}):
        assert 'role="alert"' in page.post("answer", choice="1", **fields).text
    assert 'role="alert"' in page.post("answer", reason="").text
    assert page.session.store.all() == []
    replies = [page.post("answer", choice=choice, pair=shown) for choice in ("1", "4")]
    assert ['role="alert"' in reply.text for reply in replies] == [False, True]
    answers = [each.answer for each in page.session.store.all()]
    assert [(each.pair, each.better == each.shown_first) for each in answers] == [(shown, True)]


def test_the_second_of_two_clicks_on_undo_takes_nothing_back(page):
    for num in (4, 2):
        while len(page.session.store.all()) < num:
            page.post("answer", choice="1")
        pair = page.session.standing("Ann").pair
        sent = {"pair": pair.key if pair else ""}
        told = ['role="alert"' in page.post("undo", **sent).text for _ in range(2)]
        assert (told, len(page.session.store.all())) == ([False, True], num - 1)
        assert 'role="alert"' in page.post("undo", since=f"{time.time():.3f}").text  # on the page that came in between
        assert len(page.session.store.all()) == num - 1
        page.post("undo")
        assert len(page.session.store.all()) == num - 2


def test_a_name_is_the_same_in_upper_and_lower_case(tmp_path):
    page = Page(open_session(tmp_path, write, make_pairs(2), qualification(1)))
    judge(page.session, "Änn", 1)
    for name in ("änn", "ÄNN"):
        text = page.work(name)
        assert "Qualification" not in text
        key = page.session.standing("Änn").pair.key
        assert ">Änn<" in page.post("answer", name=name, choice="1", pair=key).text
    assert [each.answer.annotator for each in page.session.store.all()] == ["Änn"] * 3


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"choice": "5"}, "choice"),
        ({"choice": "1", "since": "soon"}, "since"),
        ({"choice": "1", "since": "nan"}, "since"),
        ({"choice": "1", "name": ""}, "name"),
    ],
)
def test_malformed_answers_are_refused_with_the_field(page, fields, told):
    data = {"name": "Ann", "since": LONG_AGO, "pair": page.session.standing("Ann").pair.key, **fields}
    reply = page.client.post(f"{page.root}answer", data=data)
    assert (reply.status_code, told in reply.text) == (400, True)
    assert page.client.post(f"{page.root}answer", content=b"x" * 20_000).status_code == 413
    assert page.client.post(f"{page.root}answer", content=b"name=\xff").status_code == 400
    assert page.session.store.all() == []


def test_a_skip_has_one_of_the_reasons_or_one_s_own(page):
    page.post("answer", reason="Both are equally good")
    page.post("answer", reason="", other="a <b>riddle</b>")
    reasons = [each.answer.reason for each in page.session.store.all()]
    assert reasons == ["Both are equally good", "a <b>riddle</b>"]


def test_who_is_kept_out_is_told_and_gets_no_pair(tmp_path):
    page = Page(open_session(tmp_path, write, make_pairs(2), [*qualification(8), *make_pairs(2, preference=1)]))
    assert "Qualification" in page.work()
    assert 'id="skip"' not in page.work()
    for n in range(10):
        judge(page.session, "Ann", 1 + (n > 5))
        judge(page.session, "Bob", 1)
    assert "60 %" in page.work()
    assert shown(page.work()) == []
    assert len(shown(page.work("Bob"))) == 2


def test_a_database_that_fails_is_an_error_and_no_stored_answer(page):
    page.session.store.close()
    assert page.get("work", name="Ann").status_code == 503


def test_the_guide_shows_an_address_as_the_command_prints_it(tmp_path):
    """Without the secret there is nothing to see."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "people.md").read_text()
    with PageServer(open_session(tmp_path, write, make_pairs(2)), "") as server:
        form = re.sub(r"[\w-]{22}(?=/$)", r"[\\w-]{22}", server.url.replace(f":{urlsplit(server.url).port}", ":8017"))
    shown = re.findall(r"http://127\S*", guide)
    assert shown
    assert all(re.fullmatch(f"{form}`?:?", address) for address in shown)


def test_labels_are_written_while_the_page_is_served_too(tmp_path, monkeypatch):
    pairs, out = write(tmp_path / "pairs.json", make_pairs(3)), tmp_path / "labels.json"

    def label(_):
        assert not out.exists()
        with Store(tmp_path / "labels.sqlite") as store:
            judge(Session(store, load_pairs(pairs)), "Ann", 1)
        assert main(["annotate-human", str(pairs), "--out", str(out), "--export"]) == 0
        assert len(read(out)) == 1
        out.unlink()

    assert run(monkeypatch, pairs, "--out", out, act=label) == 0
    out.unlink()
    assert run(monkeypatch, pairs, "--out", out, act=lambda _: read(out)) == 0  # there since the start


def test_other_machines_cannot_reach_it_unasked(tmp_path):
    session = open_session(tmp_path, write, make_pairs(2))
    with pytest.raises(AlpacaFarmError, match="--allow-remote"):
        PageServer(session, "", host="")  # all interfaces
    with PageServer(session, "") as server, urllib.request.urlopen(f"{server.url}work?name=Ann") as reply:
        assert len(shown(reply.read().decode())) == 2
        assert not server.remote
    with PageServer(session, "", host="", allow_remote=True) as server:
        assert urlsplit(server.url).hostname == socket.gethostname().lower()
        assert server.remote


def test_halves_of_requests_keep_nobody_out(page, monkeypatch):
    monkeypatch.setattr(running, "MOST_CONNECTIONS", 8)
    with PageServer(page.session, "") as server, ExitStack() as stack:
        place = urlsplit(server.url)
        for _ in range(20):
            half = stack.enter_context(socket.create_connection((place.hostname, place.port)))
            half.sendall(b"GET / HTTP/1.1\r\nHost: a")
        with urllib.request.urlopen(f"{server.url}work?name=Ann", timeout=5) as reply:
            assert len(shown(reply.read().decode())) == 2


def test_the_command_serves_then_writes_and_goes_on_at_the_same_address(tmp_path, monkeypatch, capsys):
    pairs, out = write(tmp_path / "pairs.json", make_pairs(3)), tmp_path / "labels.json"
    secrets = []

    def label(server):
        secrets.append(server.url.split("/")[3])
        with urllib.request.urlopen(f"{server.url}work?name=Ann") as reply:
            key = re.search(r'name="pair" value="(\w+)"', reply.read().decode())[1]
        data = f"name=Ann&pair={key}&since={LONG_AGO}&choice=2"
        urllib.request.urlopen(f"{server.url}answer", data=data.encode()).close()

    for n in range(1, 3):
        assert run(monkeypatch, pairs, "--out", out, act=label) == 0
        assert len(read(out)) == n
    assert len(set(secrets)) == 1
    assert "Ann" in capsys.readouterr().out
    out.unlink()
    assert run(monkeypatch, pairs, "--out", out, "--export", act=lambda server: pytest.fail("served")) == 0
    assert {row["raw_preference"] for row in read(out)} <= {2, 3}
    capsys.readouterr()
    assert run(monkeypatch, pairs, "--out", out, "--export", "--without", "ann") == 0
    assert read(out) == []
    assert next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Ann")).endswith("left out")
    assert run(monkeypatch, pairs, "--out", out, "--export", "--without", "Anna") == 2
    assert "Ann" in capsys.readouterr().err.replace("Anna", "")


def test_labels_without_their_database_are_not_overwritten(tmp_path, monkeypatch, capsys):
    session = open_session(tmp_path, write, make_pairs(3))
    pairs, out, database = tmp_path / "pairs.json", tmp_path / "labels.json", tmp_path / "labels.sqlite"
    judge(session, "Ann", 1)
    session.answer("Bob", session.standing("Bob").pair.key, 9.0, reason="no idea")
    session.store.close()
    assert run(monkeypatch, pairs, "--out", out, "--export") == 0
    (tmp_path / "away").mkdir()
    database.rename(tmp_path / "away" / "labels.sqlite")
    for kept in (out, tmp_path / "labels_skipped.json"):
        before = kept.read_text()
        for options in (["--export"], []):
            assert run(monkeypatch, pairs, "--out", out, *options) == 2
            assert str(kept) in capsys.readouterr().err
        assert kept.read_text() == before
        assert not database.exists()
        kept.unlink()
    kept.write_text(before)
    open_session(tmp_path, write, make_pairs(3)).store.close()  # a new one, and empty
    assert run(monkeypatch, pairs, "--out", out) == 2
    (tmp_path / "away" / "labels.sqlite").rename(database)
    session = open_session(tmp_path, write, make_pairs(3))
    assert undo(session, "Ann") == ""
    session.store.close()
    assert run(monkeypatch, pairs, "--out", out) == 0


def test_the_qualification_set_is_given_as_long_as_it_was_answered(tmp_path, monkeypatch, capsys):
    session = open_session(tmp_path, write, make_pairs(2), qualification(2))
    for _ in range(2):
        judge(session, "Ann", 2)
    session.store.close()
    asked = [tmp_path / "pairs.json", "--out", tmp_path / "labels.json"]
    assert run(monkeypatch, *asked, "--export") == run(monkeypatch, *asked) == 2
    assert capsys.readouterr().err.count("--qualification") == 2
    assert run(monkeypatch, *asked, "--export", "--qualification", tmp_path / "key.json") == 0
    assert "not qualified" in capsys.readouterr().out


def test_what_cannot_be_served_is_told(tmp_path, monkeypatch, capsys):
    pairs, out = write(tmp_path / "pairs.json", make_pairs(3)), tmp_path / "labels.json"
    assert run(monkeypatch, pairs, "--out", out, "--host", "", "--seed", "1") == 2
    assert "--allow-remote" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [pairs]
    write(tmp_path / "mine.json", [{"instruction": "x"}])
    assert run(monkeypatch, pairs, "--out", tmp_path / "mine.json") == 2
    assert json.loads((tmp_path / "mine.json").read_text()) == [{"instruction": "x"}]
    assert run(monkeypatch, pairs, "--out", pairs) == 2
    assert run(monkeypatch, pairs, "--out", out, "--guideline", tmp_path / "none.txt") == 2
    Store(tmp_path / "labels.sqlite").close()
    assert run(monkeypatch, pairs, "--out", out, "--seed", "9") == 2
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in ("human.server", "judge_server.running"):
        monkeypatch.delitem(sys.modules, f"alpacafarm_env.{name}")
    assert run(monkeypatch, pairs, "--out", out) == 2
    assert "[human]" in capsys.readouterr().err
