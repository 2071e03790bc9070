"""Root verbs: those of the sandbox's own wordings, hand-labelled recorded instructions, and what the rules are for."""

import csv
import os
from pathlib import Path

import pandas as pd
import pytest

from alpacafarm_env.benchmarks.harness.page import read_table
from alpacafarm_env.benchmarks.protocol.roots import OTHER, QUESTION, count, figures, root
from alpacafarm_env.data.load import recorded_dataset
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.sandbox import SANDBOX, tasks

STORED = Path(__file__).resolve().parents[2] / "docs" / "studies" / "protocol" / "roots.csv"


def test_the_sandbox_asks_by_the_verbs_of_its_wordings():
    rows = SANDBOX.instructions("eval")
    assert [root(row.instruction).verb for row in rows] == [tasks.read(str(row)).verb for row in rows]


def test_the_nouns_of_the_sandbox_are_those_of_its_wordings():
    """List colors of a rose, pick animals from the input, classify the input, describe a rose."""
    slots = {"noun": "colors", "plural": "animals", "topic": "a rose", "other": "a fern", "n": "two", "given": "x"}
    expected = dict.fromkeys(("list", "name", "give", "suggest", "write", "find", "continue", "correct"), "color")
    expected |= dict.fromkeys(("explain", "describe", "summarize", "compare"), "rose")
    expected |= {"pick": "animal", "remove": "everything", "rewrite": "input", "classify": "input", "tell": ""}
    assert {template.verb: root(template.text.format(**slots)).noun for template in tasks.TEMPLATES} == expected


@pytest.mark.data
def test_recorded_instructions_have_the_roots_that_a_reader_sees():
    rows = {row.id: row.instruction for row in recorded_dataset(os.environ["ALPACAFARM_DATA"]).instructions("eval")}
    with Path(__file__).with_name("roots_by_hand.csv").open() as file:
        labels = {int(row["index"]): (row["verb"], row["noun"]) for row in csv.DictReader(file)}
    found = {index: root(rows[index]) for index in labels}
    assert sum(found[index] == label for index, label in labels.items()) == 92
    assert sum(found[index].verb == label[0] for index, label in labels.items()) == 97


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hi! Could you please write me a short, clear and friendly letter to my aunt?", ("write", "letter")),
        ("I like tea. What is it made of? List the kinds.", (QUESTION, "")),
        ("Given a sentence that may be wrong, summarise the story it tells.", ("summarize", "story")),
        ("You are given a date, convert it to another calendar.", ("convert", "")),
        ("Can you help me? Draw a table listing all planets.", ("draw", "table")),
        ("My bicycle is broken. Can you help me?", ("help", "")),
        ("Some ideas for a party", (OTHER, "")),
        ("", (OTHER, "")),
    ],
)
def test_the_root_is_what_the_first_sentence_asks_for(text, expected):
    assert root(text) == expected


def test_the_documentation_shows_the_counts():
    rows = [row for split in ("sft", "eval") for row in count("sandbox", split, SANDBOX.instructions(split))]
    pd.testing.assert_frame_equal(read_table(STORED).head(len(rows)), pd.DataFrame(rows))


def test_bars_are_as_long_as_verbs_are_frequent():
    texts = ["List two rivers.", "List a river.", "Name a river.", "Why?"]
    rows = count("recorded", "eval", [Instruction(text) for text in texts])
    assert sum(row["instructions"] for row in rows) == len(texts)
    drawn = figures(pd.DataFrame(rows))["roots_recorded"]
    (axis,) = drawn.drawing.axes
    ends = pd.Series({(bar.get_y(), bar.get_x() + bar.get_width()): 0 for bar in axis.patches}).reset_index()
    assert ends.groupby("level_0").level_1.max().tolist() == [50, 25]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["list", "name"]
