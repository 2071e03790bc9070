"""Prompt templates: the very bytes of AlpacaFarm's format, and fields that are never read as templates."""

import hashlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alpacafarm_env.errors import DataError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.templates import ALPACA, PromptTemplate

SHORT = PromptTemplate(with_input="{instruction}|{input}>", without_input="{instruction}>")


def test_alpaca_format_to_the_byte():
    """Wording, spaces and line ends decide what a released checkpoint answers: any change must be meant."""
    assert ALPACA.render(Instruction("Name a bird.")).endswith("\n\n### Instruction:\nName a bird.\n\n### Response:")
    with_input = ALPACA.render(Instruction("Sum up.", "A text."))
    assert with_input.endswith("\n\n### Instruction:\nSum up.\n\n### Input:\nA text.\n\n### Response:")
    digest = hashlib.sha256((ALPACA.with_input + ALPACA.without_input).encode()).hexdigest()
    assert digest[:16] == "cc568760d6e7bc1c"


@given(st.text())
@example("Ask\n\nmore")  # a plain text with a blank line has no input
@example("{input}{instruction}{}{0}{{input}}{")
@example(r"\1\g<1>%s")
def test_fields_are_substituted_once(field):
    assert SHORT.render(field) == SHORT.render(Instruction(field)) == f"{field}>"
    assert SHORT.render(Instruction("Ask", field)) == (f"Ask|{field}>" if field else "Ask>")
    assert SHORT.render(Instruction(field, "more")) == f"{field}|more>"


def test_tail_is_what_stands_before_a_response():
    assert ALPACA.tail == "\n\n### Response:"
    assert PromptTemplate("{input}{instruction}", "{instruction}").tail == ""


@pytest.mark.parametrize(
    ("texts", "fact"),
    [
        (("{instruction}", "{instruction}"), "with_input .*{input} and {instruction}"),
        (("{instruction}{input}", "no place"), "without_input .*{instruction}.*'no place'"),
        (("{instruction}{input}", "{instruction}{input}"), "without_input .*{instruction}"),
    ],
)
def test_placeholders_are_checked(texts, fact):
    with pytest.raises(DataError, match=fact):
        PromptTemplate(*texts)


def test_saved_and_loaded(tmp_path):
    assert PromptTemplate.load(tmp_path) is None
    file = tmp_path / "model" / "prompt_template.json"
    for template in (SHORT, ALPACA):
        template.save(file.parent)
        assert PromptTemplate.load(file.parent) == template
        content = {"prompt_inputs": template.with_input, "prompt_noinputs": template.without_input}
        assert json.loads(file.read_text()) == content
    assert list(file.parent.iterdir()) == [file]
    for damage, fact in (("{", "JSON"), ("[1]", r"\[1\]"), ('{"prompt_inputs": "{instruction}{input}"}', "noinputs")):
        file.write_text(damage)
        with pytest.raises(DataError, match=f"{file.parent}.*{fact}"):
            PromptTemplate.load(file.parent)
