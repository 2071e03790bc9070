import copy
import pickle
import string
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Text
from gymnasium.spaces.utils import flatdim, flatten, flatten_space, unflatten
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import given
from hypothesis import strategies as st

from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.spaces import MAX_TEXT_LENGTH, UnicodeText, find_surrogate


@given(st.text(st.characters(exclude_categories=()) | st.sampled_from("\ud800\udbff\udc00\udfff"), max_size=5))
def test_a_text_is_inside_unless_it_has_a_lone_surrogate(text):
    first = next((i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), -1)
    assert find_surrogate(text) == first
    assert (text in UnicodeText()) == (first < 0)
    assert (text in UnicodeText(3, min_length=2)) == (first < 0 and 2 <= len(text) <= 3)


def test_longer_texts_and_other_things_are_outside():
    assert "a" * MAX_TEXT_LENGTH in UnicodeText()
    assert not any(thing in UnicodeText() for thing in ("a" * (MAX_TEXT_LENGTH + 1), 3, None, b"bytes", ["a"]))


def test_samples_are_inside_short_seeded_and_of_the_masks_characters():
    space, twin = UnicodeText(seed=4), UnicodeText(seed=4)
    samples = [space.sample() for _ in range(200)]
    assert samples == [twin.sample() for _ in range(200)]
    copied = copy.deepcopy(space)
    assert [space.sample() for _ in range(3)] == [copied.sample() for _ in range(3)]
    assert all(sample in space and len(sample) <= 64 for sample in samples)
    assert len(set(samples)) > 150
    assert all(2 <= len(UnicodeText(3, min_length=2, seed=i).sample()) <= 3 for i in range(20))
    mask = np.zeros(sys.maxunicode + 1, dtype=np.int8)
    mask[ord("é")] = 1
    assert space.sample(mask=(4, mask)) == "éééé"


def test_it_is_a_text_equal_by_bounds():
    assert isinstance(UnicodeText(), Text)  # bridges to other libraries look for this class
    assert UnicodeText(5) == UnicodeText(5)
    assert UnicodeText(5) not in (UnicodeText(6), Text(5))
    assert repr(UnicodeText(5)) == "UnicodeText(0, 5)"


def test_it_is_cheap_to_build_copy_and_pickle():
    start = time.process_time()
    for _ in range(100):
        UnicodeText()
    assert time.process_time() - start < 0.1
    assert len(pickle.dumps(UnicodeText())) < 20_000
    assert copy.deepcopy(UnicodeText(7)) == pickle.loads(pickle.dumps(UnicodeText(7))) == UnicodeText(7)


def test_batches_are_tuples_of_texts_and_seeded():
    space = UnicodeText(seed=3)
    batch = batch_space(space, 3)
    assert ("a", "", "日本") in batch
    assert batch.sample() == batch_space(UnicodeText(seed=3), 3).sample()
    assert list(iterate(batch, ("a", "b", "c"))) == ["a", "b", "c"]
    assert concatenate(space, ["a", "b"], create_empty_array(space, 2)) == ("a", "b")


def test_a_large_batch_costs_little_and_its_spaces_draw_apart():
    def seconds(space):
        start = time.process_time()
        batches.append(batch_space(space, 500))
        return time.process_time() - start

    batches = []
    plain = Text(MAX_TEXT_LENGTH, charset=string.printable)  # each of the batch a deep copy with a seed
    assert min(seconds(UnicodeText()) for _ in range(3)) < seconds(plain) / 5
    assert len(set(batches[0].sample())) > 475


def test_flattening_keeps_the_text():
    space = UnicodeText(16)
    flat = flatten(space, "é 🙂")
    assert flat in flatten_space(space)
    assert flat.shape == (flatdim(space),)
    assert unflatten(space, flat) == "é 🙂"


def test_shared_memory_is_refused_loudly(tiny_dataset, constant_oracle):
    with pytest.raises(ValueError, match="shared_memory"):
        gym.vector.AsyncVectorEnv([lambda: InstructionEnv(tiny_dataset, oracle=constant_oracle)], shared_memory=True)
