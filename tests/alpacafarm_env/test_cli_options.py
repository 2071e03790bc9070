"""What a user of the commands sees: options, refused arguments, errors, tables, progress."""

import inspect
import io
import itertools
import math
import re
import sys
from argparse import ArgumentTypeError

import pytest
from command_files import make_pairs, write

from alpacafarm_env import errors, progress
from alpacafarm_env.__main__ import main
from alpacafarm_env.annotators.pool import make_pool
from alpacafarm_env.annotators.served import Progress
from alpacafarm_env.arguments import positive_number, real_number, whole_number
from alpacafarm_env.cli import annotation_report as judged
from alpacafarm_env.cli.commands import _LIMITS
from alpacafarm_env.cli.progress import progress_bar
from alpacafarm_env.errors import UnknownNameError, did_you_mean
from alpacafarm_env.progress import make_bar
from alpacafarm_env.tables import format_cell, format_table

ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737)."""


pytestmark = pytest.mark.usefixtures("call")


@pytest.fixture
def refused(tmp_path, capsys):
    """What `annotate` says on its way out with status 2."""
    pairs = write(tmp_path / "pairs.json", make_pairs(3))

    def annotate(*args):
        assert main(["annotate", str(pairs), "--out", "out.json", *args]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        last = err.splitlines()[-1]
        assert last.startswith("error: ")
        assert ".." not in last
        return last

    return annotate


@pytest.fixture
def passed(monkeypatch):
    """The keywords that a command has given to `make_pool`."""
    given = {}

    def make(**options):
        given.update(options)
        return make_pool(**options)

    monkeypatch.setattr(judged, "make_pool", make)
    return given


def test_limits_are_those_of_the_pool_unless_given(call, passed, tmp_path):
    pairs = write(tmp_path / "pairs.json", make_pairs(3))
    assert call("annotate", pairs, "--out", "out.json") == 0
    defaults = {name: parameter.default for name, parameter in inspect.signature(make_pool).parameters.items()}
    assert {name: passed[name] for name in (*_LIMITS, "allow_insecure")} == {
        name: defaults[name] for name in (*_LIMITS, "allow_insecure")
    }
    more = ["--timeout-s", "7", "--deadline-s", "90.5", "--requests-per-minute", "600", "--max-concurrency", "3"]
    assert call("annotate", pairs, "--out", "out.json", "--allow-insecure", *more) == 0
    assert {name: passed[name] for name in _LIMITS} == {
        "attempt_timeout_s": 7.0, "deadline_s": 90.5, "requests_per_minute": 600.0, "max_concurrency": 3
    }  # fmt: skip
    assert passed["allow_insecure"] is True


def test_the_files_of_pool_and_models_are_read_once(anyway, monkeypatch, tmp_path):
    """By the time the pool is made they may be others, and the role may be called anything."""
    pairs = write(tmp_path / "pairs.json", make_pairs(3))
    files = tmp_path / "pool.yaml", tmp_path / "models.yaml"
    files[0].write_text("{name: p, annotators: [{name: greedy_gpt4, role: model, prompt: greedy_gpt4, max_tokens: 9}]}")
    files[1].write_text("{model: sandbox-gpt4}")

    def make(**options):
        for file in files:
            file.write_text("changed")
        return make_pool(**options)

    monkeypatch.setattr(judged, "make_pool", make)
    files_given = ["--pool", f"{files[0]}", "--models", f"{files[1]}"]
    where = ["--out", "out.json", "--base-url", anyway.base_url, "--ledger", "l.sqlite"]
    assert main(["annotate", str(pairs), *files_given, *where]) == 0


def test_an_attempt_cannot_last_longer_than_its_request(refused, anyway):
    for args in (("--timeout-s", "400"), ("--deadline-s", "5")):
        told = refused(*args, "--base-url", anyway.base_url)
        assert re.search(f"--timeout-s.*--deadline-s.*{'400' if '400' in args else '60'}", told)


def test_an_address_without_encryption_is_an_option(refused):
    """With the option it is taken: what is missing then is a key, and nothing has been sent."""
    where = ("--base-url", f"http://{ELSEWHERE}/v1")
    assert re.search(f"--base-url.*OPENAI_BASE_URL.*{ELSEWHERE}.*--allow-insecure", refused(*where))
    assert re.search(f"{ELSEWHERE} has no key", refused(*where, "--allow-insecure"))


@pytest.mark.parametrize("variable", ["OPENAI_API_KEY", "MY_KEY_0123456789"])
def test_without_a_key_the_options_are_told_that_a_command_has(refused, monkeypatch, variable):
    where = ["--base-url", f"https://{ELSEWHERE}/v1"]
    if variable == "OPENAI_API_KEY":
        assert re.search("has no key.*OPENAI_API_KEY", refused(*where))
    else:
        where += ["--api-key-env", variable]
    monkeypatch.setenv(variable, "two words")
    told = refused(*where)
    assert "characters that no key has" in told
    assert "--api-key-env" in told
    assert "two words" not in told


def test_a_replay_needs_no_key(call, refused, tmp_path, capsys):
    write(tmp_path / "pairs.json", make_pairs(3))
    args = ("annotate", "pairs.json", "--out", "out.json", "--pool", "greedy")
    assert call(*args) == 0
    assert call(*args, "--replay", "--api-key-env", "NOPE") == 0
    capsys.readouterr()
    assert "--api-key-env" in refused("--api-key-env", "NOPE")


def test_a_budget_without_a_price_says_where_prices_go(refused, anyway):
    told = refused("--budget-usd", "1", "--base-url", anyway.base_url, "--model", "unheard-of")
    assert re.search("'unheard-of'.*--models.*price_usd_per_million", told)


TOTAL, STORED = 60, 48
COSTS = [0.25 * n for n in range(1, 13)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def lines(monkeypatch):
    """What is shown of a call that finds 48 answers in its ledger and waits for 12 more, `each_s` seconds each."""
    now = 1000.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)

    def show_all(file, costs, each_s=0.11):
        nonlocal now
        monkeypatch.setattr("sys.stderr", file)
        with progress_bar("eval") as show:
            for done in range(1, STORED + 1):
                show(Progress(done, TOTAL, 0.0, 0.0))
            for done, cost in enumerate(costs, STORED + 1):
                now += each_s
                show(Progress(done, TOTAL, cost, 0.0))
        return [text for text in re.split("[\\r\\n]", file.getvalue()) if text.strip()]

    return show_all


def test_a_terminal_sees_each_answer_with_time_left_and_cost(lines):
    """Not as many pairs at once as the ledger had, as tqdm would by itself."""
    told = [
        re.search(r"(\d+)/60 pairs, 00:0\d gone, (\d\d:\d\d|\?) left(?:, \$(\S+) so far)?$", text)
        for text in lines(Terminal(), COSTS)
    ]
    assert all(told)
    assert {int(found[1]) for found in told} >= set(range(STORED + 2, TOTAL + 1))
    assert told[-1][3] == "3.0000"


@pytest.mark.parametrize(("costs", "end"), [(COSTS[:2], "$0.5000 so far"), ([math.nan], "price unknown")])
def test_a_log_gets_the_start_and_the_end(lines, costs, end):
    shown = lines(io.StringIO(), costs)
    assert len(shown) == 2
    assert shown[-1].endswith(f" left, {end}")


def test_a_log_of_a_slow_judge_gets_a_line_every_few_seconds(lines):
    done = [int(re.search(r"(\d+)/60", text)[1]) for text in lines(io.StringIO(), COSTS, 2.0)]
    assert max(now - before for before, now in itertools.pairwise(done) if before >= STORED) * 2.0 <= 6


def test_nothing_is_shown_before_anything_is_known(monkeypatch):
    file = Terminal()
    monkeypatch.setattr("sys.stderr", file)
    with progress_bar("eval"):
        pass
    assert file.getvalue() == ""


def test_what_is_taken():
    assert [whole_number()("0"), whole_number(1)(" 7 "), whole_number(0, 65535)("65535")] == [0, 7, 65535]
    assert [real_number()("1e3"), real_number(0, 0.5)("0.5"), positive_number("0.001")] == [1000.0, 0.5, 0.001]


@pytest.mark.parametrize(
    ("read", "texts", "expected"),
    [
        (whole_number(), ("", "-1", "1.0", "two", "0x3", "1_0", "inf", "nan"), "int of 0 or more"),
        (whole_number(0, 65535), ("-1", "65536", "8e3", ""), "int of 0 to 65535"),
        (real_number(0, 0.5), ("", "-0.1", "0.6", "inf", "nan", "1e999", "half"), "0 to 0.5"),
        (positive_number, ("0", "-3", "nan", "inf", "soon"), "above 0"),
    ],
)
def test_what_is_refused_is_shown_beside_what_is_expected(read, texts, expected):
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=f"{expected}.*'{text}'"):
            read(text)


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("evl", ("sft", "eval"), ("'evl'", "mean 'eval'", "sft, eval")),
        ("evl", (name for name in ("sft", "eval")), ("mean 'eval'", "sft, eval")),
        (3, ["gold"], ("3.", "gold")),
        (("gold",), ["gold"], ("('gold',)",)),
        ("eval", [], ("'eval'",)),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest_and_all(name, options, parts):
    error = did_you_mean("split", name, options)
    assert isinstance(error, UnknownNameError)
    assert isinstance(error, ValueError)
    assert all(part in str(error) for part in parts)
    assert "mean" not in str(did_you_mean("oracle", "zzz", ["gold"]))


def test_every_error_is_one_of_ours_and_the_builtin_a_caller_expects():
    own = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert all(issubclass(each, errors.AlpacaFarmError) for each in own)
    for base, names in {
        ValueError: "Data InvalidResponse Pool UnparsableVerdict",
        TypeError: "InvalidResponseType",
        RuntimeError: "Unscored World Policy API Ledger",
        errors.APIError: "PermanentAPI TransientAPI Outage InvalidReply",
        errors.PermanentAPIError: "ContentRefused",
        errors.LedgerError: "BudgetExceeded Price ReplayMiss",
    }.items():
        assert all(issubclass(getattr(errors, f"{name}Error"), base) for name in names.split()), base


def test_names_to_the_left_and_numbers_to_the_right():
    rows = [{"who": "a", "model": "m", "n": 3, "rate": 51.239}, {"who": "longer", "model": "x", "n": 12, "rate": 7.0}]
    table = "who      n   rate\na        3  51.24\nlonger  12   7.00"
    assert format_table(("who", "n", "rate"), rows) == table
    assert format_table(("who", "model", "n"), rows, left=2).split("\n")[2] == "longer  x      12"
    assert format_cell(float("nan")) == "nan"
    assert format_table(("who", "n"), []) == "who  n"


def test_a_log_gets_lines_now_and_then_and_the_end_or_nothing(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with make_bar(2, "SFT", show=False) as bar:
        bar.update()
    assert file.getvalue() == ""
    with make_bar(1000, "SFT", unit="step") as bar:
        for _ in range(1000):
            bar.update()
    assert "\r" not in file.getvalue()
    first, last = filter(None, file.getvalue().split("\n"))
    assert first.startswith("SFT")
    assert "1000/1000" in last
    monkeypatch.setattr(progress, "SECONDS_IN_A_LOG", 0)
    with make_bar(3, "SFT") as bar:
        for _ in range(3):
            bar.update()
    assert len([line for line in file.getvalue().split("\n") if "/3 " in line]) >= 4


def test_a_bar_below_another_one_leaves_no_control_codes_in_a_log(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with make_bar(2, "PPO") as outer, make_bar(3, "reference") as inner:
        inner.update(3)
        outer.update(2)
    assert "3/3" in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_a_notebook_is_redrawn_in_place(monkeypatch):
    stream = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})
    monkeypatch.setattr("sys.stderr", stream())
    with make_bar(6, "SFT") as bar:
        bar.update(6)
    assert "\r" in sys.stderr.getvalue()
    assert "6/6" in sys.stderr.getvalue()
