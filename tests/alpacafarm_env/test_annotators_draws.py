"""The released code's draws, bit for bit: by themselves, in the pool and by the commands."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from command_files import read, write
from scipy.stats import chisquare

from alpacafarm_env.annotators import AnnotatorPool
from alpacafarm_env.annotators.draws import AlpacaFarmDraws
from alpacafarm_env.cli import annotation_files
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles.draws import KeyedDraws

DATA = os.environ.get("ALPACAFARM_DATA", "")
needs_data = pytest.mark.skipif(not DATA, reason="set ALPACAFARM_DATA to the folder of recorded judgements")
POOL = [
    *("gpt4_1", "gpt4_2", "gpt4_3", "gpt4_4", "gpt4_5"),
    *("chatgpt_1", "chatgpt_2", "chatgpt_3", "chatgpt_4"),
    *("davinci003_1", "davinci003_2", "davinci003_3", "davinci003_4"),
]
TEXTS = {
    "instruction": lambda record: record["instruction"],
    "merged": lambda record: "\n\n".join(filter(None, (record["instruction"], record["input"]))),
    "joined": lambda record: record["instruction"] + record["input"],
}
DEALT_OUT = {  # annotator -> how many of the 805 instructions it judges, by the text that is the key
    "instruction": [48, 65, 60, 60, 49, 68, 82, 60, 79, 44, 60, 66, 64],
    "merged": [53, 63, 54, 56, 47, 76, 77, 68, 78, 48, 63, 65, 57],
    "joined": [43, 70, 60, 61, 55, 64, 71, 60, 73, 54, 65, 72, 57],
}
SFT_LOG = [18, 20, 19, 19, 14, 23, 31, 14, 19, 10, 17, 14, 24]
PPO_LOG = [19, 19, 20, 19, 14, 24, 31, 14, 20, 10, 18, 15, 26]


def records(name):
    with gzip.open(Path(DATA) / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def rows_of(kept, text="instruction"):
    return [(TEXTS[text](record), "a", "b") for record in kept]


def vector(rows):
    return np.bincount(AlpacaFarmDraws().annotators(rows, 13), minlength=13).tolist()


def pairs_of_one(count=1000):
    return [("Name a colour.", f"answer {i}", f"reply {i * 7919 % count}") for i in range(count)]


def test_the_released_draws_are_keyed_by_the_instruction_alone():
    """1,000 pairs of one instruction: one annotator, one order, one noise label; a new seed changes them.

    So they show (a, b) and (b, a) in opposite orders of the texts.
    """
    draws, rows = AlpacaFarmDraws(), pairs_of_one()
    assert len(set(draws.annotators(rows, 13).tolist())) == 1
    assert len(set(draws.b_first(rows).tolist())) == 1
    assert len(set(draws.noise(rows, 0.25).astype(str).tolist())) == 1
    assert (draws.b_first(rows) == draws.b_first([(i, b, a) for i, a, b in rows])).all()
    assert len({int(AlpacaFarmDraws(seed).annotators(rows[:1], 13)[0]) for seed in range(50)}) > 8
    assert len(set(KeyedDraws(0, "alpaca_farm").annotators(rows, 13).tolist())) == 13


def test_noise_over_instructions_is_a_mixture_of_no_noise_and_both_labels():
    rows = [(f"Question {i}", "a", "b") for i in range(4000)]
    noise = AlpacaFarmDraws().noise(rows, 0.25)
    counts = [np.isnan(noise).sum(), (noise == 1).sum(), (noise == 2).sum()]
    assert chisquare(counts, [2000, 1000, 1000]).pvalue > 0.01
    assert np.isnan(AlpacaFarmDraws().noise(rows, 0)).all()
    assert not np.isnan(AlpacaFarmDraws().noise(rows, 0.5)).any()


def test_odd_batches_and_wrong_arguments():
    draws, row = AlpacaFarmDraws(), [("q", "a", "b")]
    assert draws.annotators([], 13).shape == draws.noise([], 0.25).shape == (0,)
    assert draws.b_first([]).dtype == bool
    assert 0 <= draws.annotators([("\ud800", "a", "b")], 13)[0] < 13
    with pytest.raises(ValueError, match="got 0"):
        draws.annotators(row, 0)
    for p in (-0.1, 0.51, float("nan")):
        with pytest.raises(ValueError, match=r"0 to 0\.5"):
            draws.noise(row, p)


@needs_data
def test_the_805_instructions_are_dealt_out_as_by_the_released_code():
    asked = records("eval_instructions")
    assert {text: vector(rows_of(asked, text)) for text in TEXTS} == DEALT_OUT
    rows = rows_of(asked, "merged")
    assert AlpacaFarmDraws().b_first(rows).sum() == 406
    noise = AlpacaFarmDraws().noise(rows, 0.25)
    assert [np.isnan(noise).sum(), (noise == 1).sum(), (noise == 2).sum()] == [402, 198, 205]
    assert AlpacaFarmDraws(seed=1).b_first(rows).sum() != 406
    texts = {record["index"]: row for record, row in zip(asked, rows, strict=True)}
    judged = records("preferences_alpaca_eval_gpt4")[:1610]  # whose `first_shown` is recorded: a = reference, b = model
    shown = AlpacaFarmDraws().b_first([texts[record["index"]] for record in judged])
    assert shown.tolist() == [record["first_shown"] == "model" for record in judged]


@needs_data
def test_the_two_logged_runs_by_the_pool(anyway, tmp_path):
    """The authors' log: 242 of 252 pairs of SFT (10 are identical), then 249 of PPO.

    One pair of PPO is identical, and two were answered already: their PPO output equals the SFT output.
    """

    def column(name):
        return [record["output"] for record in records(f"extras/alpacafarm_selfinstruct252_{name}")]

    rows = records("extras/alpacafarm_selfinstruct252_baseline")
    instructions = [Instruction(row["instruction"], row["input"]) for row in rows]
    common = {"base_url": anyway.base_url, "ledger": tmp_path / "ledger.sqlite", "compat": "alpacafarm"}
    pool = AnnotatorPool("alpaca_farm", "sandbox", **common)
    for name, log, num_cached in (("sft", SFT_LOG, 0), ("rlhf", PPO_LOG, 2)):
        details = pool.judge(instructions, column("baseline"), column(name)).details
        asked = details["annotator"][~details["cached"]].tolist()
        assert [asked.count(annotator) for annotator in POOL] == log
        assert details["cached"].sum() == num_cached


@needs_data
def test_the_commands_draw_allocation_order_and_noise(call, tmp_path):
    """`evaluate` asks, and `annotate` finds the answers it needs: both draw the same of the same pairs."""
    rows = [{key: row[key] for key in ("instruction", "input")} for row in records("eval_instructions")]
    pairs = write(tmp_path / "pairs.json", [{**row, "output_1": "One.", "output_2": "Two."} for row in rows])
    base = write(tmp_path / "base.json", [{**row, "output": "One.", "generator": "h"} for row in rows])
    ours = write(tmp_path / "ours.json", [{**row, "output": "Two.", "generator": "g"} for row in rows[::-1]])
    contests = [annotation_files.read_contest(ours, *source)[0] for source in ((None, DATA), (base, None))]
    for found in (annotation_files.read_pairs(pairs), *contests):
        assert [str(i) for i in found.instructions] == [text for text, *_ in rows_of(rows, "merged")]
        assert vector([(i, "a", "b") for i in found.instructions]) == DEALT_OUT["instruction"]
    args = ("--compat", "alpacafarm")
    assert call("evaluate", ours, "--reference", base, "--out", "first.json", *args) == 0
    assert call("annotate", "first.json", "--out", "ann.json", *args, "--pool", "ann") == 0
    first, noisy = (read(tmp_path / f"{name}.json") for name in ("first", "ann"))
    drawn = [row["annotator"] for row in first]
    assert [drawn.count(name) for name in POOL] == DEALT_OUT["instruction"]
    assert sum(row["shown_first"] == "output_2" for row in first) == 406
    assert not any(row["cached"] for row in first)
    labels = [row["preference"] for row in noisy if row["noised"]]
    assert (805 - len(labels), labels.count(1), labels.count(2)) == (402, 198, 205)
    assert all(row["cached"] for row in noisy if not row["noised"])
