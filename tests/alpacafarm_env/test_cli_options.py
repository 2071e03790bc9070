"""What a user of the commands sees: options, refused arguments, errors, tables, progress."""

import io
import itertools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
import tyro
from command_files import make_pairs, write

from alpacafarm_env.__main__ import main
from alpacafarm_env.annotators.served import Progress
from alpacafarm_env.arguments import match_name
from alpacafarm_env.cli.annotation_report import progress_bar
from alpacafarm_env.cli.options import Count, Options, Positive, parse
from alpacafarm_env.errors import AlpacaFarmError, DataError, UnknownNameError, did_you_mean
from alpacafarm_env.terminal import format_cell, format_table

LIMITS = ("max_concurrency", "attempt_timeout_s", "deadline_s", "requests_per_minute")
ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737)."""


pytestmark = pytest.mark.usefixtures("call")


@pytest.fixture
def refused(tmp_path, capsys):
    """What `annotate` says on its way out with status 2."""
    pairs = write(tmp_path / "pairs.json", make_pairs(3))

    def annotate(*args):
        assert main(["judge", "annotate", str(pairs), "--out", "out.json", *args]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        last = err.splitlines()[-1]
        assert last.startswith("error: ")
        assert ".." not in last
        return last

    return annotate


def test_an_attempt_cannot_last_longer_than_its_request(capsys):
    for args in (("--timeout-s", "400"), ("--deadline-s", "5")):
        with pytest.raises(SystemExit):
            main(["judge", "annotate", "pairs.json", "--out", "out.json", *args])
        err = capsys.readouterr().err
        assert "--timeout-s" in err
        assert "--deadline-s" in err


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
    args = ("judge", "annotate", "pairs.json", "--out", "out.json", "--pool", "greedy")
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
                show(Progress(done, TOTAL, 0.0))
            for done, cost in enumerate(costs, STORED + 1):
                now += each_s
                show(Progress(done, TOTAL, cost))
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


def test_a_log_of_a_slow_judge_gets_a_line_every_few_seconds(lines):
    done = [int(re.search(r"(\d+)/60", text)[1]) for text in lines(io.StringIO(), COSTS, 2.0)]
    assert max(now - before for before, now in itertools.pairwise(done) if before >= STORED) * 2.0 <= 6


@dataclass(frozen=True, kw_only=True)
class Run(Options):
    """Options of all kinds."""

    quick_defaults: ClassVar = {"number": 2}

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    data: Annotated[str, tyro.conf.arg(name="dataset")] = "sandbox"
    number: Count = 805
    rate: Positive | None = None
    kind: Literal["small", "large"] | None = None
    judge: str | None = None
    quick: bool = False
    out: Path | None = None


def parsed(*args, file=None):
    return parse(Run, [*args, *([] if file is None else ["--config", str(file)])], prog="run")


def test_what_a_run_writes_can_be_given_again(tmp_path):
    given = ["a", "b", "--dataset", "d", "--rate", "1e-5", "--kind", "LARGE", "--quick", "--out", str(tmp_path)]
    options = parsed(*given, "--judge", '{"name": "constant", "value": "\u00fc"}')
    options.write(tmp_path)
    again = parsed(file=tmp_path / "run.yaml")
    assert replace(again, config=None) == options
    assert (options.number, options.kind, options.out) == (2, "large", tmp_path)


def test_the_command_line_wins_over_the_file_and_that_over_quick(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("{Number: 7, data: theirs, rate: 1e-5, quick: true, judge: {pool: eval}}")
    options = parsed("--dataset", "mine", file=file)
    assert (options.data, options.number, options.rate, options.quick) == ("mine", 7, 1e-5, True)
    assert options.judge == '{"pool": "eval"}'
    assert parsed("--no-quick", "--number", "9", file=file).number == 9


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("numbr: 1", ("'numbr'", "'number'?")),
        ("number: many", ("number: ", "integer", "'many'")),
        ("number: 0", ("number: ", "1", "got 0")),
        ("kind: tiny", ("kind: ", "'small'", "'tiny'")),
        ("[1, 2]", ("[1, 2]",)),
        ("a: b: c", ("YAML",)),
    ],
)
def test_a_file_that_is_wrong_is_named_with_the_key(tmp_path, text, parts):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(AlpacaFarmError) as error:
        parsed(file=tmp_path / "run.yaml")
    assert all(part in str(error.value) for part in (*parts, "run.yaml"))
    with pytest.raises(DataError, match="nowhere"):
        parsed(file=tmp_path / "nowhere")


def test_values_out_of_bounds_are_refused_in_python_too():
    for wrong in ({"number": 0}, {"rate": math.nan}, {"kind": "tiny"}):
        with pytest.raises(ValueError, match=f"--{next(iter(wrong))}: expected"):
            Run(**wrong)


def test_names_are_read_whatever_their_case():
    options = ("win_rate", "AlpacaFarm-PPO-v0")
    given = ("Win-Rate", "win_rate", " alpacafarm-ppo-v0")
    assert [match_name("id", name, options) for name in given] == ["win_rate", "win_rate", "AlpacaFarm-PPO-v0"]
    with pytest.raises(UnknownNameError, match="'AlpacaFarm-PPO-v0'?"):
        match_name("id", "alpacafarm-pp-v0", options)


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


def test_names_to_the_left_and_numbers_to_the_right():
    rows = [{"who": "a", "model": "m", "n": 3, "rate": 51.239}, {"who": "longer", "model": "x", "n": 12, "rate": 7.0}]
    table = "who      n   rate\na        3  51.24\nlonger  12   7.00"
    assert format_table(("who", "n", "rate"), rows) == table
    assert format_table(("who", "model", "n"), rows, left=2).split("\n")[2] == "longer  x      12"
    assert format_cell(float("nan")) == "nan"
    assert format_table(("who", "n"), []) == "who  n"
