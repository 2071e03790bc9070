import copy
import subprocess
import sys

import numpy as np
import pytest

from alpacafarm_env.seeding import IndexStream, keyed_rng, keyed_uniforms


def test_keyed_rng_depends_on_seed_and_content_alone():
    assert keyed_rng(3, "flip", "a", 7).random() == keyed_rng(3, "flip", "a", 7).random()


@pytest.mark.parametrize(
    "other",
    [
        (4, "flip", "a", 7),
        (3, "flip", "a", 8),
        (3, "flip", "a"),
        (3, "flipa", 7),
        (3, "flip", "a", "7"),
        (3, "a", "flip", 7),
    ],
)
def test_keyed_rng_differs_for_another_key(other):
    assert keyed_rng(3, "flip", "a", 7).random() != keyed_rng(*other).random()


def test_keyed_values_are_pinned():
    """Stored noise would change meaning if these did: they hold on every platform and in every process."""
    assert keyed_rng(0, "stream", 1).integers(2**32) == 1176685646
    np.testing.assert_array_equal(
        keyed_uniforms(7, "order", [("a", "b"), ("ab",)]), [0.3818125450763139, 0.41315400037832295]
    )


def test_keyed_values_do_not_depend_on_the_process():
    command = (
        "from alpacafarm_env.seeding import *\n"
        "print(repr(keyed_rng(1, 'x').random()), keyed_uniforms(1, 's', [('é',)])[0])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", command],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{keyed_rng(1, 'x').random()!r} {keyed_uniforms(1, 's', [('é',)])[0]}\n"}


def test_a_uniform_does_not_depend_on_its_batch():
    rows = [(f"instruction {i}", "response") for i in range(50)]
    whole = keyed_uniforms(1, "flip", rows)
    one_by_one = [keyed_uniforms(1, "flip", [row])[0] for row in reversed(rows)]
    np.testing.assert_array_equal(whole, one_by_one[::-1])


def test_uniforms_are_uniform_and_streams_independent():
    rows = [(str(i),) for i in range(20_000)]
    flips, orders = keyed_uniforms(0, "flip", rows), keyed_uniforms(0, "order", rows)
    assert flips.min() >= 0
    assert flips.max() < 1
    # Five standard errors: of a mean of 20,000 uniforms, of each of ten cells, and of a correlation.
    assert abs(flips.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 20_000)
    assert np.abs(np.histogram(flips, 10, (0, 1))[0] - 2000).max() < 5 * np.sqrt(2000 * 0.9)
    assert abs(np.corrcoef(flips, orders)[0, 1]) < 5 / np.sqrt(20_000)


def test_any_string_has_a_key_and_no_rows_have_none():
    assert 0 <= keyed_uniforms(0, "s", [("\ud800", "")])[0] < 1
    assert keyed_uniforms(0, "s", []).shape == (0,)


def test_nothing_touches_the_global_generator():
    state = np.random.get_state()[1].copy()  # noqa: NPY002  # reading it is the point
    keyed_rng(0, "a").random()
    keyed_uniforms(0, "a", [("b",)])
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002


def test_index_stream_draws_every_index_uniformly():
    stream = IndexStream(np.random.default_rng(0), 5)
    counts = np.bincount([stream.draw() for _ in range(10_000)], minlength=6)
    assert counts[5] == 0
    assert np.abs(counts[:5] - 2000).max() < 5 * np.sqrt(10_000 * 0.2 * 0.8)


def test_index_stream_repeats_for_a_seed_and_goes_on_after_a_copy():
    stream, again = (IndexStream(np.random.default_rng(9), 1000) for _ in range(2))
    assert [stream.draw() for _ in range(150)] == [again.draw() for _ in range(150)]
    twin = copy.deepcopy(stream)
    assert [stream.draw() for _ in range(150)] == [twin.draw() for _ in range(150)]
