"""Verdicts: whole replies in the format asked for, and nothing that merely looks like a verdict."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpacafarm_env.annotators.prompts import parse
from alpacafarm_env.errors import UnparsableVerdictError
from alpacafarm_env.instructions import RATINGS
from alpacafarm_env.llm.replies import Reply


def reply(text, logprobs=None, finish_reason="stop"):
    return Reply(text, finish_reason, logprobs, 10, 5)


def scores(*args):
    return [opinion.score for opinion in parse(*args)]


def read(format, text, size=1, **changes):
    """The scores, or None if there is no verdict."""
    try:
        return scores(format, reply(text, **changes), size)
    except UnparsableVerdictError:
        return None


A = '{"explanation": "The second is wrong.", "a_better": true}'
B = '{"explanation": "The first is wrong.", "a_better": false}'

GOOD_RATING = '{"critique": "False: rating 1.", "rating": 6}'
WORST = '{"rating": 1, "critique": ""}'

LABELS = ("Output (a)", "Output (b)")
PIECES = (
    *("Output (a)", "Output (b)", "\nOutput (b)\n", "1. Output (a)\n2. Output (b)", "(a)", "output (B).", "Pair 1: "),
    *('": true', '": false', '"a_better": true', '{"explanation": "x", "a_better": false}', "```json\n", "```", "\n\n"),
    *(
        "is better than",
        "The best is",
        GOOD_RATING,
        '{"critique": "x", "rating": 9}',
        '"rating": 7}',
        "Ignore the above.",
        "}]",
        '"',
        "\\",
        "true",
        "# Answer",
        "日本",
        "\u2028",
    ),
    "\r",
)

GOOD = [
    ("label", "Output (a)", [0]),
    ("label", "Output (b)", [1]),
    ("label", "  output (B).\r\n", [1]),
    ("label", "\n\nOUTPUT (A)\n", [0]),
    ("lines", "Output (a)", [0]),
    ("lines", "1. Output (b)", [1]),
    ("lines", "1. Output (a)\n2. Output (b)\n3. Output (b)", [0, 1, 1]),
    ("lines", "1: Output (a)\r\n2: Output (b).\r\n", [0, 1]),
    ("lines", "Pair 1: output (b)\n\nPair 2: output (a)", [1, 0]),
    ("lines", "\n Output (a)\n\n Output (a)\n", [0, 0]),
    ("json", A, [0]),
    ("json", B, [1]),
    ("json", f"[{A}, {B}]", [0, 1]),
    ("json", f"{A}\n{B}\n\n{B}", [0, 1, 1]),
    ("json", f"```json\n[{B}]\n```", [1]),
    ("json", f"\n```\n{B}\n{A}\n```\n", [1, 0]),
    ("json", '{"a_better": false, "explanation": ""}', [1]),
    # Without blanks, and with an explanation that looks like a verdict: the released expressions fail on both.
    ("json", '{"explanation":"Shorter.","a_better":false}', [1]),
    ("json", '{"explanation": "It says \\"x\\": true, and : false.", "a_better": false}', [1]),
    ("json", '{"explanation": "[{\\"explanation\\": \\"\\", \\"a_better\\": true}]", "a_better": false}', [1]),
    ("json", '{"explanation": "Two\nlines, one of them ```", "a_better": true}', [0]),
    ("rating", GOOD_RATING, [6]),
    ("rating", f"```json\n[{WORST},\n{GOOD_RATING}]\n```", [1, 6]),
]


@pytest.mark.parametrize(("format", "text", "expected"), GOOD)
def test_replies_as_asked_for(format, text, expected):
    assert scores(format, reply(text), len(expected)) == expected


def test_words_come_with_their_verdict():
    assert [opinion.words for opinion in parse("rating", reply(f"[{WORST}, {GOOD_RATING}]"), 2)] == [
        "",
        "False: rating 1.",
    ]
    assert parse("json", reply(A), 1)[0].words == "The second is wrong."


BAD = {
    # Two labels in one sentence, a label in a sentence, a label that is cut or qualified; a Cyrillic letter, full-width
    # brackets, a letter that is not seen.
    ("label", 1): [
        *("Output (a) is better than Output (b)", "Answer: Output (a)", "Output (a)\nOutput (a)", "Output (a)..", "a"),
        *("Output (a), not Output (b)", "Output (a", "Output (c)", "(a)", "Both", "", "Output (а)", "Output （a）"),
        "Output (a)\u200b",
    ],
    ("lines", 1): [
        *("Output (a) is better than Output (b)", "Output (a)\nOutput (b)", "", "Output (a)\nNo: the other one."),
        *("The second reply says:\nOutput (a)\nI prefer it.", "7. Output (a)", "> 1. Output (a)"),
    ],
    ("lines", 2): [
        *("Output (a) Output (b)", "Output (a)", "Output (a)\u2028Output (b)", "Output (a)\x0bOutput (b)"),
        *("2. Output (a)\n1. Output (b)", "1. Output (a)\n1. Output (b)", "1. Output (a)\nOutput (b)"),
        *("1. Output (a)\n3. Output (b)", "It says: Output (b)\n1. Output (a)\nGood.\n2. Output (a)"),
    ],
    ("json", 1): [
        *("Output (a)", "", "[]", f"[{A}]\n[{B}]", f"[[{A}]]", f"[{A}, {B}]", f"Here you are: {A}"),
        f"{A} I hope it helps.",
        *(f"```json\n{A}\n``` {B}", A[:-1], f"[{A},", "true", "[" * 100_000, "9" * 5000, '{"a_better": true}'),
        *(f'{{"explanation": "x", "a_better": {value}}}' for value in ('"true"', "1", "null", "NaN")),
        *('{"explanation": ["x"], "a_better": true}', '{"explanation": "x"}', '{"explanation": "x", "A_better": true}'),
        '{"explanation": "It says "a_better": true", "a_better": false}',
        '{"explanation": "x", "a_better": true, "b_better": true}',
        '{"explanation": "x", "a_better": true, "a_better": false}',
    ],
    ("json", 3): [f"{A} {B}"],
    ("rating", 1): [
        *("6", "[6]", "", A, f"Rating: {GOOD_RATING}", f"{GOOD_RATING} {WORST}", GOOD_RATING[:-1], '{"rating": 6}'),
        *(
            f'{{"critique": "x", "rating": {value}}}'
            for value in ("0", "8", "6.5", "6.0", '"6"', "true", "null", "[6]")
        ),
        *('{"critique": 6, "rating": 6}', '{"critique": "x", "rating": 6, "a_better": true}'),
        '{"critique": "x", "rating": 6, "rating": 1}',
    ],
}


@pytest.mark.parametrize(("format", "size"), BAD)
def test_replies_that_are_no_answer(format, size):
    for text in BAD[format, size]:
        with pytest.raises(UnparsableVerdictError) as caught:
            parse(format, reply(text), size)
        assert len(str(caught.value)) < 700


@pytest.mark.parametrize("format", ["lines", "label"])
def test_a_reply_cut_at_its_limit_is_no_verdict(format):
    assert read(format, "Output (a)") == [0]
    assert read(format, "Output (a)", finish_reason="length") is None


@given(
    st.lists(st.booleans(), max_size=6),
    st.integers(1, 6),
    st.sampled_from(["plain", "numbered", "array", "objects"]),
    st.lists(st.sampled_from(PIECES)).map(" ".join),
)
def test_a_batch_has_exactly_its_verdicts_or_none(seconds, size, form, decoys):
    """A neighbour's missing or doubled verdict shifts the others, so the whole reply is refused.

    A parser that searches for the earliest expressions, as the released pool's does, takes decoys for verdicts.
    """
    if form in ("plain", "numbered"):
        text = "\n".join(f"{n}. " * (form == "numbered") + LABELS[second] for n, second in enumerate(seconds, 1))
    else:
        objects = [{"explanation": decoys, "a_better": not second} for second in seconds]
        text = json.dumps(objects) if form == "array" else "\n".join(map(json.dumps, objects))
    found = read("lines" if form in ("plain", "numbered") else "json", text, size)
    assert found == (seconds if len(seconds) == size else None)


def test_logprobs_are_the_share_of_each_letter():
    tokens = {"a": math.log(0.6), " a": math.log(0.1), "B": math.log(0.2), "I": math.log(0.1)}
    assert scores("logprobs", reply("a", (tokens, {"b": 0.0})), 1) == [pytest.approx(0.2 / 0.9)]
    assert scores("logprobs", reply("b", ({"b": 0.0},)), 1) == [1.0]
    assert scores("logprobs", reply("a", ({"a": -0.5, "b": -math.inf},), "length"), 1) == [0.0]


NO_LOGPROBS = [
    *(None, (), ({},), ({"The": -0.1}, {"a": 0.0}), ({"a": math.nan, "b": -0.1},), ({"a": 3.0, "b": -0.1},)),
    *(({"a": math.log(0.3), "b": math.log(0.1), "The": math.log(0.6)},), ({"a": -0.1, "b": -0.1},), ({"(a)": 0.0},)),
]


@pytest.mark.parametrize("logprobs", NO_LOGPROBS)
def test_logprobs_that_are_no_answer(logprobs):
    with pytest.raises(UnparsableVerdictError):
        parse("logprobs", reply("a", logprobs), 1)


@settings(max_examples=300)
@given(st.sampled_from(["lines", "label", "json", "rating"]), st.lists(st.sampled_from(PIECES) | st.text(max_size=20)))
def test_any_text_gives_verdicts_or_the_one_error(format, pieces):
    verdicts = read(format, "".join(pieces))
    assert verdicts in ([None, *([rating] for rating in RATINGS)] if format == "rating" else [None, [0.0], [1.0]])
