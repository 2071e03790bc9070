"""Prompt templates: the very bytes of AlpacaFarm's format, and fields that are never read as templates."""

import hashlib
import json

import pytest

from alpacafarm_env.errors import DataError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.templates import ALPACA, PromptTemplate

SHORT = PromptTemplate(with_input="{instruction}|{input}>", without_input="{instruction}>")


def test_alpaca_format_to_the_byte():
    without = ALPACA.render(Instruction("Name a bird."))
    with_input = ALPACA.render(Instruction("Sum up.", "A text."))
    assert without.startswith("Below is an instruction that describes a task. Write a response that appropriately")
    assert without.endswith("\n\n### Instruction:\nName a bird.\n\n### Response:")
    assert "paired with an input that provides further context" in with_input
    assert with_input.endswith("\n\n### Instruction:\nSum up.\n\n### Input:\nA text.\n\n### Response:")
    # Wording, spaces and line ends decide what a released checkpoint answers: any change must be meant.
    assert [len(text) for text in (ALPACA.without_input, ALPACA.with_input)] == [152, 224]
    digest = hashlib.sha256((ALPACA.with_input + ALPACA.without_input).encode()).hexdigest()
    assert digest[:16] == "cc568760d6e7bc1c"


@pytest.mark.parametrize("instruction", ["Ask", Instruction("Ask"), Instruction("Ask", "")])
def test_without_input(instruction):
    assert SHORT.render(instruction) == "Ask>"


def test_plain_text_with_a_blank_line_has_no_input():
    assert SHORT.render(str(Instruction("Ask", "more"))) == "Ask\n\nmore>"
    assert SHORT.render(Instruction("Ask", "more")) == "Ask|more>"


@pytest.mark.parametrize(
    "field", ["{input}", "{instruction}", "{", "}", "{}", "{0}", "{{input}}", r"\1", r"\g<1>", "%s"]
)
def test_fields_are_substituted_once(field):
    assert SHORT.render(field) == f"{field}>"
    assert SHORT.render(Instruction(field, field)) == f"{field}|{field}>"


def test_braces_around_placeholders_stay():
    template = PromptTemplate('{"q": "{instruction}", "i": "{input}"}', '{"q": "{instruction}"}')
    assert template.render("Hi") == '{"q": "Hi"}'


def test_tail_is_what_stands_before_a_response():
    assert ALPACA.tail == "\n\n### Response:"
    assert PromptTemplate("{input}{instruction}", "{instruction}").tail == ""


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("{instruction}", "{instruction}"), "with_input text must hold exactly {input} and {instruction}"),
        (("{instruction}{input}", "no place"), "without_input text must hold exactly {instruction}, got 'no place'"),
        (("{instruction}{input}", "{instruction}{input}"), "without_input text must hold exactly {instruction}"),
    ],
)
def test_placeholders_are_checked(texts, message):
    with pytest.raises(DataError) as caught:
        PromptTemplate(*texts)
    assert message in str(caught.value)


def test_saved_and_loaded(tmp_path):
    SHORT.save(tmp_path / "model")
    assert PromptTemplate.load(tmp_path / "model") == SHORT
    content = json.loads((tmp_path / "model" / "prompt_template.json").read_text())
    assert content == {"prompt_inputs": SHORT.with_input, "prompt_noinputs": SHORT.without_input}
    ALPACA.save(tmp_path / "model")
    assert PromptTemplate.load(tmp_path / "model") == ALPACA
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["prompt_template.json"]


def test_folder_without_a_template_has_none(tmp_path):
    assert PromptTemplate.load(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "expected JSON"), ("[1]", r"got \[1\]"), ('{"prompt_inputs": "{instruction}{input}"}', "prompt_noinputs")],
)
def test_damaged_file_is_named(tmp_path, content, message):
    (tmp_path / "prompt_template.json").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        PromptTemplate.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
