"""Texts: instructions, their space, and prompt templates: the very bytes of AlpacaFarm's format."""

import copy
import hashlib
import json
import pickle

import gymnasium as gym
import pytest
from gymnasium.spaces import Text
from gymnasium.vector.utils import batch_space
from hypothesis import example, given
from hypothesis import strategies as st

from alpacafarm_env.data import RowDataset
from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.errors import DataError
from alpacafarm_env.instructions import Instruction, Preference
from alpacafarm_env.spaces import MAX_TEXT_LENGTH, UnicodeText, find_surrogate
from alpacafarm_env.templates import ALPACA, PromptTemplate

FULL = Instruction("Translate.", "Good\nmorning {input}", id=3, split="eval", source="koala")
BRIEF = Instruction("Be brief.\n\nTranslate.", "Good morning", system="Be brief.", id=3)


def test_input_follows_after_a_blank_line():
    assert FULL == "Translate.\n\nGood\nmorning {input}"
    assert hash(FULL) == hash(str(FULL))
    assert FULL.split() == ["Translate.", "Good", "morning", "{input}"]  # str's own, not the field
    assert (FULL.instruction, FULL.input, FULL.id) == ("Translate.", "Good\nmorning {input}", 3)
    assert (FULL.split_name, FULL.source) == ("eval", "koala")
    plain = Instruction("Hello")
    assert plain == "Hello"
    assert (plain.input, plain.id, plain.split_name, plain.source) == ("", -1, "", "")


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x, 2)), lambda x: pickle.loads(pickle.dumps(x))],
)
def test_copies_keep_text_and_fields(duplicate):
    for ask in (FULL, BRIEF):
        twin = duplicate(ask)
        assert type(twin) is Instruction
        assert twin == ask
        assert all(getattr(twin, name) == getattr(ask, name) for name in Instruction.__slots__)


def test_an_instruction_begins_with_its_system_text():
    assert (BRIEF, BRIEF.system, FULL.system) == ("Be brief.\n\nTranslate.\n\nGood morning", "Be brief.", "")
    with pytest.raises(ValueError, match="Be brief"):
        Instruction("Translate.", system="Be brief.")


def test_environments_ask_with_the_system_text():
    rows = [{"prompt": f"Translate {i}.", "system": "Be brief."} for i in range(4)]
    options = {"dataset": RowDataset("own", {"unlabeled": ("own", rows)}), "oracle": {"name": "constant", "value": 1.0}}
    observations, _ = gym.make_vec("AlpacaFarm-PPO-v0", num_envs=3, **options).reset(seed=0)
    assert {each.system for each in observations} == {"Be brief."}
    assert all(each.startswith("Be brief.\n\nTranslate") for each in observations)


def test_it_is_immutable():
    for change in (lambda: setattr(FULL, "id", 4), lambda: delattr(FULL, "input"), lambda: setattr(FULL, "new", 1)):
        with pytest.raises(AttributeError, match="immutable"):
            change()


def test_preferences_count_from_one_and_have_two_responses():
    first, second = (Preference(FULL, ("a", "b"), n) for n in (1, 2))
    assert (first.chosen, first.rejected) == (second.rejected, second.chosen) == ("a", "b")
    for responses, preference in ((("a", "b"), 0), (("a", "b"), 3), (("a", "b"), 1.5), (("a", "b"), None), ("abc", 1)):
        with pytest.raises(ValueError, match="1 or 2|two"):
            Preference(FULL, tuple(responses), preference)


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


@given(st.text(st.characters(exclude_categories=()) | st.sampled_from("\ud800\udbff\udc00\udfff"), max_size=5))
def test_only_lone_surrogates_are_outside(text):
    first = next((i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), -1)
    assert find_surrogate(text) == first
    assert (text in UnicodeText()) == (first < 0)
    assert (text in UnicodeText(3, min_length=2)) == (first < 0 and 2 <= len(text) <= 3)


def test_longer_texts_and_other_things_are_outside():
    assert "a" * MAX_TEXT_LENGTH in UnicodeText()
    assert not any(thing in UnicodeText() for thing in ("a" * (MAX_TEXT_LENGTH + 1), 3, None, b"bytes", ["a"]))


def test_samples_are_inside_short_and_seeded():
    space, twin = UnicodeText(seed=4), UnicodeText(seed=4)
    samples = [space.sample() for _ in range(200)]
    assert samples == [twin.sample() for _ in range(200)]
    copied = copy.deepcopy(space)
    assert [space.sample() for _ in range(3)] == [copied.sample() for _ in range(3)]
    assert all(sample in space and len(sample) <= 64 for sample in samples)
    assert len(set(samples)) > 150
    assert all(2 <= len(UnicodeText(3, min_length=2, seed=i).sample()) <= 3 for i in range(20))
    with pytest.raises(ValueError, match="mask"):
        space.sample(mask=(4, None))


def test_it_is_a_text_equal_by_bounds():
    assert isinstance(UnicodeText(), Text)  # bridges to other libraries look for this class
    assert UnicodeText(5) == UnicodeText(5)
    assert UnicodeText(5) not in (UnicodeText(6), Text(5))


def test_batches_are_tuples_of_texts_and_seeded():
    space = UnicodeText(seed=3)
    batch = batch_space(space, 3)
    assert ("a", "", "日本") in batch
    assert batch.sample() == batch_space(UnicodeText(seed=3), 3).sample()


def test_shared_memory_is_refused_loudly(tiny_dataset, constant_oracle):
    with pytest.raises(ValueError, match="shared_memory"):
        gym.vector.AsyncVectorEnv([lambda: InstructionEnv(tiny_dataset, oracle=constant_oracle)], shared_memory=True)
