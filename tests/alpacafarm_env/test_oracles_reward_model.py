"""The learned reward model: what it reads, that batches do not matter, and what is refused."""

import json
import subprocess
import sys

import numpy as np
import pytest
from tiny_reward_model import make_tiny_reward_model

from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles import OracleError, RewardModel, judge
from alpacafarm_env.oracles.reward_model import batches, cut_middle

INSTRUCTIONS = [Instruction(f"Ask {i}", "something" if i % 3 == 0 else "") for i in range(24)]
RESPONSES = ["word " * (i % 11) + "🙂" * (i % 3) for i in range(24)]


SCALE = {"alpacafarm_reward_mean": 0.5, "alpacafarm_reward_std": 2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_reward_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def scores(folder):
    return RewardModel(folder).score(INSTRUCTIONS, RESPONSES)


def changed(folder, tmp_path, **config):
    """A copy of the folder with other keys in config.json."""
    tmp_path.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return tmp_path


def test_equals_the_plain_model(folder, scores):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for i in (0, 1, 10):
        x, y = INSTRUCTIONS[i], RESPONSES[i]
        prompt = f"{x.instruction}|{x.input}:" if x.input else f"{x}:"
        with torch.no_grad():
            expected = model(**tokenizer(prompt + y + "</s>", return_tensors="pt")).logits.item()
        assert scores[i] == pytest.approx(expected, abs=1e-5)
    assert scores.std() > 0.1  # the model tells responses apart, so equality means something


@pytest.mark.parametrize("limits", [{"batch_size": 1}, {"batch_size": 5}, {"max_batch_tokens": 100}])
def test_batches_and_padding_do_not_matter(folder, scores, limits):
    np.testing.assert_allclose(RewardModel(folder, **limits).score(INSTRUCTIONS, RESPONSES), scores, rtol=0, atol=1e-5)


def test_neighbours_do_not_matter(folder, scores):
    long = "a much longer neighbour " * 4
    beside = RewardModel(folder).score([*INSTRUCTIONS, "Ask"], [*RESPONSES, long])
    np.testing.assert_allclose(beside[:-1], scores, rtol=0, atol=1e-5)


def test_a_special_token_in_a_text_is_plain_text(folder):
    model = RewardModel(folder)
    (plain,), (spelled,) = model.encode(["Ask"], ["fine"]), model.encode(["Ask"], ["fine</s><pad>"])
    assert plain[-1] == 2
    assert spelled.count(2) == 1
    assert 0 not in spelled
    assert len(spelled) == len(plain) + len("</s><pad>")
    assert model.score(["Ask"], ["fine"]) != model.score(["Ask"], ["fine</s>"])


def test_the_end_of_sequence_follows_the_config(folder, tmp_path):
    without = RewardModel(changed(folder, tmp_path, alpacafarm_end_with_eos=False))
    (tokens,) = without.encode(["Ask"], ["fine"])
    assert [*tokens, 2] == RewardModel(folder).encode(["Ask"], ["fine"])[0]


def test_calibration_of_the_config(folder, tmp_path, scores):
    calibrated = RewardModel(changed(folder, tmp_path, **SCALE))
    np.testing.assert_allclose(calibrated.score(INSTRUCTIONS, RESPONSES), (scores - 0.5) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("alpacafarm_reward_std", value) for value in (0.0, -1.0, float("nan"), "1", None)),
        *(("alpacafarm_reward_mean", value) for value in (float("inf"), float("nan"), [])),
        *(("alpacafarm_max_length", value) for value in (1, "512", None)),
        ("num_labels", "1"),
        ("num_labels", []),
    ],
)
def test_a_number_of_the_config_that_is_none_is_refused(folder, tmp_path, key, value):
    with pytest.raises(CheckpointError, match="config"):
        RewardModel(changed(folder, tmp_path, **{"num_labels": 1, "id2label": None, **SCALE, key: value}))


@pytest.mark.parametrize("key", ["alpacafarm_reward_mean", "alpacafarm_reward_std"])
def test_a_mean_without_a_deviation_and_the_reverse_are_refused(folder, tmp_path, key):
    """As when a letter of the other's name is damaged, which would change every score without a word."""
    RewardModel(changed(folder, tmp_path / "both", **SCALE))
    with pytest.raises(CheckpointError, match="alpacafarm_reward_mean and alpacafarm_reward_std"):
        RewardModel(changed(folder, tmp_path / "one", **{key: SCALE[key]}))


def test_long_texts_lose_their_middle_and_say_so(folder):
    model = RewardModel(folder, max_length=32)
    start, end = "the beginning ", " the end"
    verdicts = judge(model, ["Ask"] * 3, [start + "x" * 60 + end, start + "y" * 70 + end, "short"])
    assert verdicts.details["reward_input_truncated"].tolist() == [True, True, False]
    assert verdicts.scores[0] != verdicts.scores[2]
    other_end = model.score(["Ask"], [start + "x" * 60 + " the END"])
    assert abs(other_end - verdicts.scores[0]) > 1e-4  # the end counts
    middle = model.score(["Ask"], [start + "x" * 30 + "z" + "x" * 29 + end])
    np.testing.assert_allclose(middle, verdicts.scores[:1], rtol=0, atol=1e-5)  # the middle does not


def test_the_models_positions_are_the_limit(folder):
    verdicts = judge(RewardModel(folder, max_length=10_000), ["Ask"] * 2, ["w" * 1_000_000, "w" * 100])
    assert verdicts.details["reward_input_truncated"].tolist() == [True, False]
    assert np.isfinite(verdicts.scores).all()


def test_cut_middle_keeps_both_ends():
    assert cut_middle(list(range(10)), 5) == [0, 1, 7, 8, 9]
    assert cut_middle([1, 2, 3], 3) == [1, 2, 3]


def test_batches_hold_every_row_once_within_both_limits():
    lengths = np.random.default_rng(0).integers(1, 50, 300).tolist()
    found = list(batches(lengths, 16, 200))
    assert sorted(row for batch in found for row in batch) == list(range(300))
    assert all(len(batch) <= 16 and max(lengths[row] for row in batch) * len(batch) <= 200 for batch in found)
    assert list(batches([500, 3], 16, 200)) == [[0], [1]]  # a text above the limit goes alone


def test_nothing_heavy_is_loaded_before_the_first_score(folder):
    code = (
        "import sys; from alpacafarm_env.oracles import RewardModel; RewardModel(sys.argv[1]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def test_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r"missing: expected a reward model's folder, found none"):
        RewardModel(tmp_path / "missing")


def test_no_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: expected a model's configuration"):
        RewardModel(tmp_path)


def test_a_config_that_is_no_object(folder, tmp_path):
    changed(folder, tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"expected a JSON object"):
        RewardModel(tmp_path)


def test_no_safetensors(folder, tmp_path):
    changed(folder, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"expected weights as \*\.safetensors, found .*pytorch_model\.bin"):
        RewardModel(tmp_path)


def test_two_labels(tmp_path):
    with pytest.raises(CheckpointError, match=r"one score .* has 2 labels"):
        RewardModel(make_tiny_reward_model(tmp_path, num_labels=2))


def test_weights_without_a_head(folder, tmp_path):
    """transformers would fill in a random one with a warning."""
    from safetensors.torch import load_file, save_file

    changed(folder, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if k != "score.weight"}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        RewardModel(tmp_path).score(["Ask"], ["fine"])


def test_cut_weights(folder, tmp_path):
    changed(folder, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="none that can be used"):
        RewardModel(tmp_path).score(["Ask"], ["fine"])


def test_weights_that_give_nan(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    changed(folder, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["score.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(OracleError, match="weights are broken"):
        RewardModel(tmp_path).score(["Ask"], ["fine"])


@pytest.mark.parametrize("pad", [None, 2])
def test_a_pad_that_hides_the_end_of_sequence(folder, tmp_path, pad):
    path = changed(folder, tmp_path, pad_token_id=pad)
    if pad is None:  # the tokenizer's own takes its place
        assert np.isfinite(RewardModel(path).score(["Ask", "Ask"], ["fine", ""])).all()
    else:
        with pytest.raises(CheckpointError, match="pad_token_id that differs from the end-of-sequence token"):
            RewardModel(path).score(["Ask"], ["fine"])


@pytest.mark.parametrize("limits", [{"batch_size": 0}, {"max_batch_tokens": 0}, {"max_length": 1}])
def test_limits_are_positive(folder, limits):
    with pytest.raises(ValueError, match="or more, got"):
        RewardModel(folder, **limits)
