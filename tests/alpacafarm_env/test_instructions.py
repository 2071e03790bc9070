import copy
import pickle

import pytest

from alpacafarm_env.instructions import Demonstration, Instruction, Preference

FULL = Instruction("Translate.", "Good\nmorning {input}", id=3, split="eval", source="koala")


def test_the_text_is_the_instruction_and_the_input_after_a_blank_line():
    assert FULL == "Translate.\n\nGood\nmorning {input}"
    assert Instruction("Hello") == "Hello"
    assert Instruction("") == ""


def test_the_fields_are_kept():
    assert (FULL.instruction, FULL.input) == ("Translate.", "Good\nmorning {input}")
    assert (FULL.id, FULL.split_name, FULL.source) == (3, "eval", "koala")
    plain = Instruction("Hello")
    assert (plain.input, plain.id, plain.split_name, plain.source) == ("", -1, "", "")


def test_it_is_a_str_everywhere():
    assert isinstance(FULL, str)
    assert {str(FULL): 1}[FULL] == 1
    assert hash(FULL) == hash(str(FULL))
    assert FULL.split() == ["Translate.", "Good", "morning", "{input}"]
    assert f"{FULL:.4}" == "Tran"


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        *(lambda x, p=p: pickle.loads(pickle.dumps(x, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)),
    ],
)
def test_copies_keep_text_and_fields(duplicate):
    twin = duplicate(FULL)
    assert type(twin) is Instruction
    assert twin == FULL
    assert all(getattr(twin, name) == getattr(FULL, name) for name in Instruction.__slots__)


def test_it_is_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        FULL.id = 4
    with pytest.raises(AttributeError, match="immutable"):
        del FULL.input
    with pytest.raises(AttributeError, match="immutable"):
        FULL.new_field = 1


def test_preferences_count_from_one():
    first, second = (Preference(FULL, ("a", "b"), n) for n in (1, 2))
    assert (first.chosen, first.rejected) == ("a", "b")
    assert (second.chosen, second.rejected) == ("b", "a")


@pytest.mark.parametrize("preference", [0, 3, 1.5, None])
def test_another_preference_is_refused(preference):
    with pytest.raises(ValueError, match="Expected preference 1 or 2"):
        Preference(FULL, ("a", "b"), preference)


def test_a_preference_needs_two_responses():
    with pytest.raises(ValueError, match="Expected two responses, got 3"):
        Preference(FULL, ("a", "b", "c"), 1)


def test_records_compare_by_value_and_are_frozen():
    assert Demonstration(FULL, "a") == Demonstration(FULL, "a")
    with pytest.raises(AttributeError):
        Demonstration(FULL, "a").response = "b"
