"""The throughput command: what it writes, and how long responses are."""

import json
import math

import pytest

from alpacafarm_env.benchmarks import throughput

SHAPE = ["--hidden-size", "64", "--num-layers", "1", "--vocab-size", "40", "--rollouts", "8", "--prompt-tokens", "4"]


def measured(tmp_path, *options):
    assert throughput.run(throughput.parse([*SHAPE, "--out", str(tmp_path), *options])) == 0
    return json.loads((tmp_path / "throughput.json").read_text())


@pytest.mark.parametrize("options", [["--value", "model"], ["--value", "adapter", "--lora", "2"]])
def test_it_writes_seconds_memory_and_shares_of_every_phase(tmp_path, capsys, options):
    found = measured(tmp_path, "--response-tokens", "4", "--steps", "2", *options)
    phases = ["sample", "score", "prepare", "update"]
    assert list(found["seconds"]) == [*phases, "step"]
    for spread in found["seconds"].values():
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    parts = sum(found["seconds"][name]["min"] for name in phases)
    assert parts <= found["seconds"]["step"]["max"]
    assert list(found["peak_memory_bytes"]) == list(found["expected_memory_bytes"]) == phases
    assert all(share > 0 for share in found["share_of_gemm_rate"].values())
    assert found["tokens_a_step"] <= 8 * (4 + 4)
    assert found["versions"]["torch"]
    told = capsys.readouterr().out
    assert all(name in told for name in found["seconds"])


def test_responses_are_as_long_as_the_probability_of_their_end_says(tmp_path):
    rows, steps, width = 64, 2, 24
    options = ["--rollouts", str(rows), "--steps", str(steps), "--response-tokens", str(width)]
    found = measured(tmp_path, *options, "--eos-probability", "0.1")
    length = found["tokens_a_step"] / rows - 4
    expected = throughput.mean_length(throughput.parse([*SHAPE, *options, "--eos-probability", "0.1"]))
    assert expected == pytest.approx(sum(0.9**k for k in range(width)))
    assert length == pytest.approx(expected, abs=4 * 7 / math.sqrt(rows * steps))  # four standard errors


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--hidden-size", "65"], "--hidden-size"),
        (["--eos-probability", "1"], "--eos-probability"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_bad_options_are_named(options, named, capsys):
    with pytest.raises(SystemExit):
        throughput.parse(options)
    assert named in capsys.readouterr().err
