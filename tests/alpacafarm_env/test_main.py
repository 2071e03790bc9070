"""The command line: what it prints, its options and their files, and what it says of wrong ones."""

import math
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
import tyro
from command_files import make_pairs, write

import alpacafarm_env
from alpacafarm_env import sandbox
from alpacafarm_env.__main__ import COMMANDS, load, main
from alpacafarm_env.cli.options import Count, Options, Positive, parse
from alpacafarm_env.errors import AlpacaFarmError, DataError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.sandbox import gold
from alpacafarm_env.sandbox.show import page, show

ROOT = Path(__file__).resolve().parents[2]
ASK = Instruction("List three traits of a lion.", id=3, split="eval")
GOOD, BAD = "A lion is brave, golden and proud.", "A lion is shy."


def test_show_prints_what_it_promises(capsys):
    assert main(["show", "--split", "eval", "--num", "2"]) == 0
    text = capsys.readouterr().out
    assert "This is a simulation." in text
    assert "2 of the 805 instructions of the split eval, seed 0" in text
    pages = text.split("──\n")[1:]
    assert len(pages) == 2
    ids = [int(number) for number in re.findall(r"── \d of 2: eval (\d+), \w+ ─", text)]
    for index, body in zip(ids, pages, strict=True):
        ask = sandbox.SANDBOX.instructions("eval")[index]
        reference = sandbox.SANDBOX.references("eval")[index]
        squeezed = " ".join(body.split())
        assert f"Instruction {' '.join(ask.instruction.split())}" in squeezed
        assert f"Reference {' '.join(reference.split())}" in squeezed
        assert f"reference {gold.gold(ask, reference):.4g}" in squeezed
        assert all(
            word in body for word in ("Policy", "complete", "excess", "gpt4", "davinci003", "greedy_gpt4", "human")
        )
    assert max(map(len, text.splitlines())) <= 100


def test_same_seed_same_text_and_more_pages_only_add():
    first, again, more = list(show(num=1)), list(show(num=1)), list(show(num=2))
    assert first == again
    bodies = [[line.partition(": eval")[2] or line for line in shown[2].splitlines()] for shown in (first, more)]
    assert bodies[0] == bodies[1]
    assert list(show(num=1, seed=1))[2] != first[2]


def test_a_page_by_hand():
    lines = page(ASK, BAD, GOOD, width=80)
    assert lines[:3] == [f"Instruction  {ASK}", f"Reference    {BAD}", f"Policy       {GOOD}"]
    table = [line.split() for line in lines]
    assert ["reference", "1.4", "0", "1", "0", "1", "1", "0"] in table
    assert ["policy", "7", "1", "0", "0", "1", "1", "0"] in table
    assert ["weights", "5", "-0.6", "-0.4", "1", "1", "-0.1"] in table
    counts = {
        row[0]: len(row) - 2
        for row in table
        if row and row[0] in ("gpt4", "chatgpt", "davinci003", "greedy_gpt4", "human")
    }
    assert counts == {"gpt4": 5, "chatgpt": 4, "davinci003": 4, "greedy_gpt4": 1, "human": 16}


JUDGE = ["judge", "annotate", "p.json", "--out", "o.json"]
WRONG = [
    *(["show", "--num", bad] for bad in ("0", "two", "inf")),
    *(["show", "--seed", bad] for bad in ("-1", str(10**20), 5_000 * "9")),
    *([*JUDGE, "--flip", bad] for bad in ("0.6", "nan")),
    *([*JUDGE, "--budget-usd", bad] for bad in ("-1", "inf", "1.1e9")),
    *([*JUDGE, *two] for two in (["--max-concurrency", "0"], ["--timeout-s", "0"], ["--deadline-s", "nan"])),
    *([*JUDGE, *two] for two in (["--requests-per-minute", "-1"], ["--seed", "-1"], ["--seed", "1.5"])),
    [*JUDGE, "--budget", "3"],
    [*JUDGE, "--models", "openai", "--model", "x"],
    ["judge", "evaluate", "o.json", "--data", "sandbox", "--reference", "r.json"],
    ["judge", "annotate", "pairs.json"],
]


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_wrong_arguments_are_exit_status_two(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    named = args[-2:] if args[-1] != "pairs.json" else ["--out"]  # what is missing
    assert any(each in capsys.readouterr().err for each in named)


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["shw"], "show"), (["judge", "anotate"], "annotate"), (["study", "win_rate"], "win_rate_curve")],
)
def test_an_unknown_command_is_answered_with_the_closest(words, meant, capsys):
    assert main(words) == 2
    assert f"'{meant}'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["annotate", "evaluate"])
def test_judging_has_its_old_names_too(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert f"judge {name}" in capsys.readouterr().out


def test_commands_are_read_whatever_their_case(capsys):
    for words in (
        ["Show", "--num", "1"],
        ["LEDGER", "--ledger", "none"],
        ["annotate_human", "none", "--out", "x.json"],
    ):
        assert main(words) == (0 if words[0] == "Show" else 2)
        assert "Unknown command" not in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["--help"], ["judge"], ["study"]])
def test_commands_and_studies_are_listed(args, capsys):
    assert main(args) == 0
    printed = capsys.readouterr().out
    studies = ("leaderboard", *(path.parent.name for path in ROOT.glob("benchmarks/*/__main__.py")))
    expected = {"judge": ("annotate", "evaluate"), "study": studies}.get(" ".join(args), COMMANDS)
    assert all(re.search(rf"^  {name}\b", printed, re.MULTILINE) for name in expected)


def test_help_and_version_load_no_heavy_library():
    heavy = ("torch", "transformers", "openai", "scipy", "tqdm", "stamina", "pandas", "matplotlib")
    code = "import sys; from alpacafarm_env.__main__ import main\n"
    for words in (["--version"], [], ["judge", "annotate", "--help"], ["serve", "--help"]):
        code += f"try: main({words})\nexcept SystemExit: pass\n"
    code += f"print('heavy:', *[name for name in {heavy} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[-1] == "heavy:"
    assert alpacafarm_env.__version__ in printed[0]


def test_a_shell_completes_commands_and_their_options(monkeypatch, capsys):
    loaded = {name: load(name) for name in ("judge annotate", "judge evaluate", "merge")}
    monkeypatch.setattr("alpacafarm_env.__main__._all_options", lambda: loaded)
    with pytest.raises(SystemExit) as end:
        main(["--tyro-print-completion", "bash"])
    assert not end.value.code
    script = capsys.readouterr().out
    assert all(word in script for word in ("annotate", "evaluate", "merge", "--both-orders", "--pool"))


def test_a_reader_who_has_seen_enough_causes_no_complaint():
    code = """
from alpacafarm_env import __main__ as command
from alpacafarm_env.cli import commands
commands.Show.run = lambda self: commands.Report("x\\n" * 10**6)
raise SystemExit(command.main(["show"]))
"""
    shell = ["bash", "-c", f'{sys.executable} -c "$0" | head -n 1', code]
    run = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("x\n", "")


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
