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

from alpacafarm_env.spaces import MAX_TEXT_LENGTH, UnicodeText, find_surrogate


@pytest.mark.parametrize(
    "text", ["", "Hello, world!\n\ttabs", "“é” 日本 🙂", "\x00", chr(sys.maxunicode), "a" * MAX_TEXT_LENGTH]
)
def test_any_text_is_inside(text):
    assert text in UnicodeText()


@pytest.mark.parametrize("thing", ["\ud800", "fine \udfff here", "a" * (MAX_TEXT_LENGTH + 1), 3, None, b"bytes", ["a"]])
def test_lone_surrogates_longer_texts_and_other_things_are_outside(thing):
    assert thing not in UnicodeText()


def test_both_bounds_are_inclusive_and_count_code_points():
    space = UnicodeText(3, min_length=2)
    assert [text in space for text in ("🙂", "🙂🙂", "🙂🙂🙂", "🙂🙂🙂🙂")] == [False, True, True, False]


def test_find_surrogate():
    assert find_surrogate("plain") == find_surrogate("日本🙂") == -1
    assert find_surrogate("日\udc80") == 1


def test_samples_are_inside_short_and_seeded():
    space, twin = UnicodeText(seed=4), UnicodeText(seed=4)
    samples = [space.sample() for _ in range(200)]
    assert samples == [twin.sample() for _ in range(200)]
    assert all(sample in space and len(sample) <= 64 for sample in samples)
    assert len(set(samples)) > 150
    assert all(2 <= len(UnicodeText(3, min_length=2, seed=i).sample()) <= 3 for i in range(20))


def test_a_mask_chooses_the_characters():
    mask = np.zeros(sys.maxunicode + 1, dtype=np.int8)
    mask[ord("é")] = 1
    assert UnicodeText(seed=0).sample(mask=(4, mask)) == "éééé"


def test_it_is_a_text_equal_by_bounds():
    assert isinstance(UnicodeText(), Text)  # bridges to other libraries look for this class
    assert UnicodeText(5) == UnicodeText(5)
    assert UnicodeText(5) != UnicodeText(6)
    assert UnicodeText(5) != Text(5)
    assert repr(UnicodeText(5)) == "UnicodeText(0, 5)"


def test_it_is_cheap_to_build_copy_and_pickle():
    start = time.process_time()
    for _ in range(100):
        UnicodeText()
    assert time.process_time() - start < 0.1
    assert len(pickle.dumps(UnicodeText())) < 20_000
    assert copy.deepcopy(UnicodeText(7)) == pickle.loads(pickle.dumps(UnicodeText(7))) == UnicodeText(7)


def test_batches_are_tuples_of_texts():
    space = UnicodeText()
    batch = batch_space(space, 3)
    assert ("a", "", "日本") in batch
    assert list(iterate(batch, ("a", "b", "c"))) == ["a", "b", "c"]
    assert concatenate(space, ["a", "b"], create_empty_array(space, 2)) == ("a", "b")


def test_a_large_batch_costs_little_and_its_spaces_draw_apart():
    def seconds(space):
        start = time.process_time()
        batches.append(batch_space(space, 2_000))
        return time.process_time() - start

    batches = []
    plain = Text(MAX_TEXT_LENGTH, charset=string.printable)  # each of the batch a deep copy with a seed
    assert min(seconds(UnicodeText()) for _ in range(3)) < seconds(plain) / 5
    assert len(set(batches[0].sample())) > 1_900


def test_a_batch_of_a_seeded_space_is_seeded():
    assert batch_space(UnicodeText(seed=3), 4).sample() == batch_space(UnicodeText(seed=3), 4).sample()


def test_a_copy_draws_the_same_and_apart():
    space = UnicodeText(seed=3)
    twin = copy.deepcopy(space)
    assert [space.sample() for _ in range(3)] == [twin.sample() for _ in range(3)]


def test_flattening_keeps_the_text():
    space = UnicodeText(16)
    flat = flatten(space, "é 🙂")
    assert flat in flatten_space(space)
    assert flat.shape == (flatdim(space),)
    assert unflatten(space, flat) == "é 🙂"


def test_shared_memory_is_refused_loudly(tiny_dataset, constant_oracle):
    from alpacafarm_env.envs.instruction import InstructionEnv

    def make():
        return InstructionEnv(tiny_dataset, oracle=constant_oracle)

    with pytest.raises(ValueError, match="shared_memory"):
        gym.vector.AsyncVectorEnv([make], shared_memory=True)
