"""The command line: `show` prints what it promises, the same for the same seed; wrong requests are told so.

The commands of the annotators are tested in test_cli_*.py.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import alpacafarm_env
from alpacafarm_env import sandbox
from alpacafarm_env.__main__ import main
from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.sandbox import gold
from alpacafarm_env.sandbox.judges import GREEDY, HUMANS, POOL, Annotators
from alpacafarm_env.sandbox.show import MIN_TEMPERATURE, opinions, page, sample, show

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
        assert f"reference {gold.gold(ask, reference):.2f}" in squeezed
        assert all(
            word in body for word in ("Policy", "complete", "excess", "gpt4", "davinci003", "greedy_gpt4", "human")
        )
    assert max(map(len, text.splitlines())) <= 100


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert alpacafarm_env.__version__ in capsys.readouterr().out


def test_the_benchmarks_are_listed_each_with_how_to_run_it(monkeypatch, capsys):
    from alpacafarm_env.benchmarks.__main__ import main as list_commands

    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    assert list_commands() == 0
    listed = capsys.readouterr().out
    folders = (path.parent.name for path in ROOT.glob("benchmarks/*/__main__.py"))
    assert all(f"  {name} " in listed for name in ("train", "leaderboard", *folders))
    assert "python -m alpacafarm_env.benchmarks.NAME" in listed
    assert "harness" not in listed


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
    assert ["reference", "1.40", "0", "1", "0", "1", "1", "0"] in table
    assert ["policy", "7.00", "1", "0", "0", "1", "1", "0"] in table
    assert ["weights", "+5.0", "-0.6", "-0.4", "+1.0", "+1.0", "-0.1"] in table
    counts = {
        row[0]: len(row) - 2
        for row in table
        if row and row[0] in ("gpt4", "chatgpt", "davinci003", "greedy_gpt4", "human")
    }
    assert counts == {"gpt4": 5, "chatgpt": 4, "davinci003": 4, "greedy_gpt4": 1, "human": 16}


def test_long_texts_wrap_beside_their_label_and_lists_stay_lists():
    lines = page(ASK, "- brave\n- golden", "brave " * 60, width=72)
    at = lines.index("Reference    - brave")
    assert lines[at + 1] == " " * 13 + "- golden"
    assert all(len(line) <= 72 for line in lines[: lines.index("")])
    assert page(ASK, "", GOOD)[1] == "Reference    (empty)"


def test_opinions_are_means_over_both_orders():
    for pool in (POOL, GREEDY, HUMANS):
        judge = Annotators("any", pool)
        expected = [
            sum(float(judge.probabilities([ASK], [BAD], [GOOD], k, a_first=first)[0]) for first in (True, False)) / 2
            for k in range(len(pool))
        ]
        assert opinions(pool, ASK, BAD, GOOD) == pytest.approx(expected)
        assert opinions(pool, ASK, GOOD, GOOD) == pytest.approx([0.5] * len(pool))


def test_a_response_depends_on_its_instruction_alone():
    asks = sandbox.SANDBOX.instructions("val")[:3]
    together = sample(sandbox.POLICY, asks, temperature=0.7, seed=0)
    assert together[::-1] == sample(sandbox.POLICY, asks[::-1], temperature=0.7, seed=0)
    assert together != sample(sandbox.POLICY, asks, temperature=0.7, seed=1)
    assert all("<" not in text for text in together)


def test_the_policy_answers_sensibly():
    """Nearly greedy, the shipped policy is fluent and mostly true."""
    asks = sandbox.SANDBOX.instructions("val")[:12]
    rows = [gold.parts(a, r) for a, r in zip(asks, sample(sandbox.POLICY, asks, temperature=0.1, seed=0), strict=True)]
    assert sum(row.fluent for row in rows) / 12 > 0.9
    assert sum(row.complete for row in rows) / 12 > 0.2


def test_temperatures_down_to_greedy():
    """The coldest sampling accepted is greedy in effect; no temperature between it and 0 is accepted."""
    asks = sandbox.SANDBOX.instructions("val")[:3]
    greedy = sample(sandbox.POLICY, asks, temperature=0, seed=0)
    assert greedy == sample(sandbox.POLICY, asks, temperature=0, seed=1)
    assert greedy == sample(sandbox.POLICY, asks, temperature=MIN_TEMPERATURE, seed=0)
    for temperature in (1e-308, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="0.001"):
            sample(sandbox.POLICY, asks, temperature=temperature, seed=0)


def test_a_missing_policy_is_said_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        list(show(policy=tmp_path / "policy"))


def test_unknown_split_is_exit_status_two(capsys):
    assert main(["show", "--split", "evl"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "'eval'" in captured.err


OUT = ["annotate", "p.json", "--out", "o.json"]
WRONG = [
    *(["show", "--num", bad] for bad in ("0", "two", "inf")),
    *(["show", "--temperature", bad] for bad in ("nan", "inf", "1e-308", "-1", "9e-4", "warm")),
    ["shw"],
    *([*OUT, "--flip", bad] for bad in ("0.6", "nan")),
    *([*OUT, "--budget-usd", bad] for bad in ("-1", "inf", "1.1e9")),
    *(
        [*OUT, option, bad]
        for option, bad in (("--max-concurrency", "0"), ("--timeout-s", "0"), ("--deadline-s", "nan"))
    ),
    *([*OUT, option, bad] for option, bad in (("--requests-per-minute", "-1"), ("--seed", "-1"), ("--seed", "1.5"))),
    [*OUT, "--budget", "3"],
    *([*OUT, *two] for two in (["--both-orders", "--compat", "alpacafarm"], ["--models", "openai", "--model", "x"])),
    ["evaluate", "o.json", "--data", "sandbox", "--reference", "r.json"],
    ["annotate", "pairs.json"],
]


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_wrong_arguments_are_exit_status_two(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    named = args[-2:] if args[-1] != "pairs.json" else ["--out"]  # what is missing
    assert any(each.lstrip("-") in last for each in named)


def test_without_arguments_it_prints_help():
    run = subprocess.run([sys.executable, "-m", "alpacafarm_env"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("usage: python -m alpacafarm_env")
    for command in ("show", "annotate", "evaluate", "ledger", "judge-server"):
        assert re.search(rf"^    {command}\b", run.stdout, re.MULTILINE)


def test_help_loads_no_heavy_library():
    heavy = ("torch", "transformers", "openai", "pydantic", "yaml", "scipy", "tqdm", "stamina", "sqlite3")
    code = "import sys; from alpacafarm_env.__main__ import main\n"
    code += "try: main(['annotate', '--help'])\nexcept SystemExit: "
    code += f"print('heavy:', *[name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "heavy:"


def test_ctrl_c_is_exit_status_130_without_a_traceback(capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("alpacafarm_env.sandbox.show.show", interrupted)
    assert main(["show"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_who_has_seen_enough_causes_no_complaint():
    code = """
from alpacafarm_env import __main__ as command
report = command.Report("x\\n" * 10**6)
command.add_commands = lambda commands: commands.add_parser("many").set_defaults(run=lambda options: report)
raise SystemExit(command.main(["many"]))
"""
    shell = ["bash", "-c", f'{sys.executable} -c "$0" | head -n 1', code]
    run = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("x\n", "")


@pytest.mark.parametrize(
    "command",
    [
        ["show"],
        ["annotate", "pairs.json", "--out", "out.json"],
        ["annotate-human", "pairs.json", "--out", "out.json"],
        ["export", "--format", "trl", "--out", "out"],
        ["serve", "AlpacaFarm-Gold-v0"],
        ["judge-server"],
    ],
)
def test_a_seed_that_cannot_be_one_is_refused_by_every_command(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seed in ("-1", str(10**20), 5_000 * "9"):
        with pytest.raises(SystemExit) as ended:
            main([*command, f"--seed={seed}"])
        assert ended.value.code == 2
        assert "--seed" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
