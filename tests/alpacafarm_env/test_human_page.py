"""The page that people judge on, and the command that serves it."""

import re
import time
import urllib.request
from html import unescape

import pytest
from command_files import (
    LONG_AGO,
    SCRIPT,
    Page,
    human_pairs,
    judge,
    open_session,
    qualification,
    read,
    run,
    undo,
    write,
)


@pytest.fixture
def page(tmp_path):
    return Page(open_session(tmp_path, human_pairs(4)))


def shown(text):
    """The texts of the responses, in their order on the page."""
    parts = re.findall(r'<section aria-label="Response [AB]">.*?<div class="text" dir="auto">(.*?)</div>', text, re.S)
    return [unescape(part) for part in parts]


def test_the_answer_counts_for_what_was_shown_there(page):
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
    page = Page(open_session(tmp_path, [row]))
    name = f'A"{SCRIPT}'
    for text in (page.work(), page.work(name), page.get("work", name="").text):
        assert SCRIPT not in text
        assert "<script src=" in text
    assert sorted(shown(page.work())) == [row["output_1"], row["output_2"]]


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


def test_answers_that_cannot_be_meant_are_not_stored(page):
    shown = page.session.standing("Ann").pair.key
    assert 'role="alert"' in page.post("answer", choice="1", since=f"{time.time():.3f}").text
    assert 'role="alert"' in page.post("answer", reason="").text
    assert page.session.store.all() == []
    replies = [page.post("answer", choice=choice, pair=shown) for choice in ("1", "4")]
    assert ['role="alert"' in reply.text for reply in replies] == [False, True]
    answers = [each.answer for each in page.session.store.all()]
    assert [(each.pair, each.better == each.shown_first) for each in answers] == [(shown, True)]


def test_a_names_case_does_not_matter(tmp_path):
    page = Page(open_session(tmp_path, human_pairs(2), qualification(1)))
    judge(page.session, "Änn", 1)
    for name in ("änn", "ÄNN"):
        text = page.work(name)
        assert "Qualification" not in text
        key = page.session.standing("Änn").pair.key
        assert ">Änn<" in page.post("answer", name=name, choice="1", pair=key).text
    assert [each.answer.annotator for each in page.session.store.all()] == ["Änn"] * 3


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"choice": "5"}, "choice"),
        ({"choice": "1", "since": "soon"}, "since"),
        ({"choice": "1", "since": "nan"}, "since"),
        ({"choice": "1", "name": ""}, "name"),
    ],
)
def test_malformed_answers_are_refused_with_the_field(page, fields, name):
    data = {"name": "Ann", "since": LONG_AGO, "pair": page.session.standing("Ann").pair.key, **fields}
    reply = page.client.post(f"{page.root}answer", data=data)
    assert (reply.status_code, name in reply.text) == (400, True)
    assert page.client.post(f"{page.root}answer", content=b"x" * 20_000).status_code == 413
    assert page.client.post(f"{page.root}answer", content=b"name=\xff").status_code == 400
    assert page.session.store.all() == []


def test_a_database_that_fails_is_an_error(page):
    page.session.store.close()
    assert page.get("work", name="Ann").status_code == 503


def test_the_command_goes_on_at_the_same_address(tmp_path, monkeypatch, capsys):
    pairs, out = write(tmp_path / "pairs.json", human_pairs(3)), tmp_path / "labels.json"
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


def test_labels_without_their_database_are_not_overwritten(tmp_path, monkeypatch, capsys):
    session = open_session(tmp_path, human_pairs(3))
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
    open_session(tmp_path, human_pairs(3)).store.close()  # a new one, and empty
    assert run(monkeypatch, pairs, "--out", out) == 2
    (tmp_path / "away" / "labels.sqlite").rename(database)
    session = open_session(tmp_path, human_pairs(3))
    assert undo(session, "Ann") == ""
    session.store.close()
    assert run(monkeypatch, pairs, "--out", out) == 0


def test_an_answered_qualification_set_must_be_given(tmp_path, monkeypatch, capsys):
    session = open_session(tmp_path, human_pairs(2), qualification(2))
    for _ in range(2):
        judge(session, "Ann", 2)
    session.store.close()
    words = [tmp_path / "pairs.json", "--out", tmp_path / "labels.json"]
    assert run(monkeypatch, *words, "--export") == run(monkeypatch, *words) == 2
    assert capsys.readouterr().err.count("--qualification") == 2
    assert run(monkeypatch, *words, "--export", "--qualification", tmp_path / "key.json") == 0
    assert "not qualified" in capsys.readouterr().out


def test_what_cannot_be_served_is_refused(tmp_path, monkeypatch, capsys):
    pairs, out = write(tmp_path / "pairs.json", human_pairs(3)), tmp_path / "labels.json"
    assert run(monkeypatch, pairs, "--out", out, "--host", "") == 2
    assert "--allow-remote" in capsys.readouterr().err
    assert not out.exists()
    assert run(monkeypatch, pairs, "--out", pairs) == 2
    assert run(monkeypatch, pairs, "--out", out, "--guideline", tmp_path / "none.txt") == 2
