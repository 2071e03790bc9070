import copy
import subprocess
import sys

import numpy as np

from alpacafarm_env.seeding import IndexStream, keyed_rng, keyed_uniforms

KEY = (3, "flip", "a", 7)
PINNED = "0.3818125450763139 0.41315400037832295 1176685646"
PROGRAM = """
from alpacafarm_env.seeding import *
print(*keyed_uniforms(7, "order", [("a", "b"), ("ab",)]), keyed_rng(0, "stream", 1).integers(2**32))
"""


def test_keyed_values_are_pinned_and_do_not_depend_on_the_process():
    """Stored noise would change meaning if they did: they hold on every platform and in every process."""
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == PINNED
    uniforms = keyed_uniforms(7, "order", [("a", "b"), ("ab",)])
    assert f"{uniforms[0]} {uniforms[1]} {keyed_rng(0, 'stream', 1).integers(2**32)}" == PINNED


def test_keyed_rng_depends_on_all_of_its_key_alone():
    keys = [KEY, KEY, (4, *KEY[1:]), (*KEY[:3], 8), KEY[:3], (3, "flipa", 7), (*KEY[:3], "7"), (3, "a", "flip", 7)]
    drawn = [keyed_rng(*key).random() for key in keys]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == len(set(keys))


def test_a_uniform_does_not_depend_on_its_batch():
    rows = [(f"instruction {i}", "response") for i in range(50)]
    one_by_one = [keyed_uniforms(1, "flip", [row])[0] for row in reversed(rows)]
    np.testing.assert_array_equal(keyed_uniforms(1, "flip", rows), one_by_one[::-1])
    assert 0 <= keyed_uniforms(0, "s", [("\ud800", "")])[0] < 1
    assert keyed_uniforms(0, "s", []).shape == (0,)


def test_uniforms_are_uniform_streams_independent_and_the_global_generator_untouched():
    state = np.random.get_state()[1].copy()  # noqa: NPY002  # reading it is the point
    rows = [(str(i),) for i in range(20_000)]
    flips, orders = keyed_uniforms(0, "flip", rows), keyed_uniforms(0, "order", rows)
    assert (flips.min() >= 0, flips.max() < 1) == (True, True)
    # Five standard errors: of a mean of 20,000 uniforms, of each of ten cells, and of a correlation.
    assert abs(flips.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 20_000)
    assert np.abs(np.histogram(flips, 10, (0, 1))[0] - 2000).max() < 5 * np.sqrt(2000 * 0.9)
    assert abs(np.corrcoef(flips, orders)[0, 1]) < 5 / np.sqrt(20_000)
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002


def test_index_stream_repeats_for_a_seed_and_goes_on_after_a_copy():
    stream, again = (IndexStream(np.random.default_rng(9), 1000) for _ in range(2))
    assert [stream.draw() for _ in range(150)] == [again.draw() for _ in range(150)]
    twin = copy.deepcopy(stream)
    assert [stream.draw() for _ in range(150)] == [twin.draw() for _ in range(150)]
