import copy
import pickle

import pytest

from alpacafarm_env.instructions import Demonstration, Instruction, Preference

FULL = Instruction("Translate.", "Good\nmorning {input}", id=3, split="eval", source="koala")


def test_the_text_is_the_instruction_and_the_input_after_a_blank_line():
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
    twin = duplicate(FULL)
    assert type(twin) is Instruction
    assert twin == FULL
    assert all(getattr(twin, name) == getattr(FULL, name) for name in Instruction.__slots__)


def test_it_is_immutable():
    for change in (lambda: setattr(FULL, "id", 4), lambda: delattr(FULL, "input"), lambda: setattr(FULL, "new", 1)):
        with pytest.raises(AttributeError, match="immutable"):
            change()
    assert Demonstration(FULL, "a") == Demonstration(FULL, "a")
    with pytest.raises(AttributeError):
        Demonstration(FULL, "a").response = "b"


def test_preferences_count_from_one_and_have_two_responses():
    first, second = (Preference(FULL, ("a", "b"), n) for n in (1, 2))
    assert (first.chosen, first.rejected) == (second.rejected, second.chosen) == ("a", "b")
    for responses, preference in ((("a", "b"), 0), (("a", "b"), 3), (("a", "b"), 1.5), (("a", "b"), None), ("abc", 1)):
        with pytest.raises(ValueError, match="1 or 2|two"):
            Preference(FULL, tuple(responses), preference)
