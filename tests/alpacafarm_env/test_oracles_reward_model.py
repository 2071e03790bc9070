"""The learned reward model: what it reads, that batches do not matter, and what is refused."""

import json
import shutil

import numpy as np
import pytest
from hub_models import make_tiny_reward_model
from safetensors.numpy import load_file, save_file

from alpacafarm_env.errors import CheckpointError
from alpacafarm_env.folders import hash_model
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles import OracleError, RewardModel, judge, make_oracle
from alpacafarm_env.oracles.reward_model import batches

INSTRUCTIONS = [Instruction(f"Ask {i}", "something" if i % 3 == 0 else "") for i in range(24)]
RESPONSES = ["word " * (i % 11) + "🙂" * (i % 3) for i in range(24)]
SCALE = {"alpacafarm_reward_mean": 0.5, "alpacafarm_reward_std": 2.0}


@pytest.fixture(scope="module")
def model(tiny_model):
    return RewardModel(tiny_model)


@pytest.fixture(scope="module")
def scores(model):
    return model.score(INSTRUCTIONS, RESPONSES)


@pytest.fixture
def changed(tiny_model, tmp_path):
    """A function that copies the folder with other keys in config.json."""

    def change(name="copy", **config):
        folder = shutil.copytree(tiny_model, tmp_path / name)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return folder

    return change


def test_equals_the_plain_model(tiny_model, scores):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model).eval()
    for i in (0, 1, 10):
        x, y = INSTRUCTIONS[i], RESPONSES[i]
        prompt = f"{x.instruction}|{x.input}:" if x.input else f"{x}:"
        with torch.no_grad():
            expected = model(**tokenizer(prompt + y + "</s>", return_tensors="pt")).logits.item()
        assert scores[i] == pytest.approx(expected, abs=1e-5)
    assert scores.std() > 0.1  # the model tells responses apart, so equality means something


def test_special_tokens_in_texts_are_plain(model):
    (plain,), (spelled,) = model.encode(["Ask"], ["fine"]), model.encode(["Ask"], ["fine</s><pad>"])
    assert plain[-1] == 2
    assert spelled.count(2) == 1
    assert 0 not in spelled
    assert len(spelled) == len(plain) + len("</s><pad>")
    assert model.score(["Ask"], ["fine"]) != model.score(["Ask"], ["fine</s>"])


def test_end_of_sequence_and_calibration_follow_the_config(model, changed, scores):
    (tokens,) = RewardModel(changed("without", alpacafarm_end_with_eos=False)).encode(["Ask"], ["fine"])
    assert [*tokens, 2] == model.encode(["Ask"], ["fine"])[0]
    calibrated = RewardModel(changed(**SCALE)).score(INSTRUCTIONS, RESPONSES)
    np.testing.assert_allclose(calibrated, (scores - 0.5) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("alpacafarm_reward_std", [0.0, float("nan"), "1"]),
        ("alpacafarm_reward_mean", [float("inf")]),
        ("alpacafarm_max_length", [1]),
        ("num_labels", ["1"]),
    ],
)
def test_faulty_config_numbers_are_refused(changed, key, values):
    for number, value in enumerate(values):
        with pytest.raises(CheckpointError, match="config"):
            RewardModel(changed(str(number), **{"num_labels": 1, "id2label": None, **SCALE, key: value}))


def test_long_texts_lose_their_middle_and_say_so(tiny_model):
    model = RewardModel(tiny_model, max_length=32)
    start, end = "the beginning ", " the end"
    verdicts = judge(model, ["Ask"] * 3, [start + "x" * 60 + end, start + "y" * 70 + end, "short"])
    assert verdicts.details["reward_input_truncated"].tolist() == [True, True, False]
    assert verdicts.scores[0] != verdicts.scores[2]
    other_end = model.score(["Ask"], [start + "x" * 60 + " the END"])
    assert abs(other_end - verdicts.scores[0]) > 1e-4  # the end counts
    middle = model.score(["Ask"], [start + "x" * 30 + "z" + "x" * 29 + end])
    np.testing.assert_allclose(middle, verdicts.scores[:1], rtol=0, atol=1e-5)  # the middle does not


def test_the_models_positions_are_the_limit(tiny_model):
    verdicts = judge(RewardModel(tiny_model, max_length=10_000), ["Ask"] * 2, ["w" * 100_000, "w" * 100])
    assert verdicts.details["reward_input_truncated"].tolist() == [True, False]
    assert np.isfinite(verdicts.scores).all()


def test_batches_hold_every_row_once_within_both_limits():
    lengths = np.random.default_rng(0).integers(1, 50, 300).tolist()
    found = list(batches(lengths, 16, 200))
    assert sorted(row for batch in found for row in batch) == list(range(300))
    assert all(len(batch) <= 16 and max(lengths[row] for row in batch) * len(batch) <= 200 for batch in found)
    assert list(batches([500, 3], 16, 200)) == [[0], [1]]  # a text above the limit goes alone


def test_other_folders_are_refused(changed, tmp_path):
    (tmp_path / "empty").mkdir()
    (changed("list") / "config.json").write_text("[]")
    weights = changed("pickled") / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    make_tiny_reward_model(tmp_path / "two", num_labels=2)
    for name, fact in {
        "missing": "none",
        "empty": r"config\.json",
        "list": "JSON object",
        "pickled": r"safetensors.*pytorch_model\.bin",
        "two": "2 labels",
    }.items():
        with pytest.raises(CheckpointError, match=f"{name}.*{fact}"):
            RewardModel(tmp_path / name)


@pytest.mark.parametrize("fault", ["no head", "nan", "cut"])
def test_broken_weights_give_no_score(changed, fault):
    """In the place of a missing head transformers would fill in a random one with a warning."""
    file = changed() / "model.safetensors"
    weights = load_file(file)
    if fault == "no head":
        del weights["score.weight"]
    else:
        weights["score.weight"][0, 0] = float("nan")
    save_file(weights, file, {"format": "pt"})
    if fault == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    error, fact = {
        "no head": (CheckpointError, r"score\.weight"),
        "nan": (OracleError, "weights"),
        "cut": (CheckpointError, str(file.parent)),
    }[fault]
    with pytest.raises(error, match=fact):
        RewardModel(file.parent).score(["Ask"], ["fine"])


def test_a_pad_that_hides_the_end_of_sequence(changed):
    own = RewardModel(changed("none", pad_token_id=None))  # the tokenizer's own takes its place
    assert np.isfinite(own.score(["Ask", "Ask"], ["fine", ""])).all()
    with pytest.raises(CheckpointError, match="pad_token_id"):
        RewardModel(changed(pad_token_id=2)).score(["Ask"], ["fine"])


def test_limits_are_positive(tiny_model):
    for name, least in (("batch_size", 1), ("max_length", 2)):
        with pytest.raises(ValueError, match=name):
            RewardModel(tiny_model, **{name: least - 1})


# Adapters, types, hub names -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory):
    """The folder of a LoRA adapter, as peft saves it, over the whole model: other attention, another head."""
    import peft
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("adapter") / "reward"
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="SEQ_CLS")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(base, config)
        torch.nn.init.normal_(model.base_model.model.score.modules_to_save["default"].weight)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "prompt_template.json"):
        shutil.copy(tiny_model / name, folder)
    return folder


def test_adapters_equal_the_merged_model(adapter, tmp_path, scores):
    import peft

    found = RewardModel(adapter).score(INSTRUCTIONS, RESPONSES)
    model = peft.AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=1)
    model.merge_and_unload().save_pretrained(tmp_path)
    for file in adapter.glob("*to*.json"):
        shutil.copy(file, tmp_path)
    shutil.copy(adapter / "prompt_template.json", tmp_path)
    np.testing.assert_allclose(found, RewardModel(tmp_path).score(INSTRUCTIONS, RESPONSES), rtol=0, atol=1e-4)
    assert np.abs(found - scores).max() > 0.1


def test_adapters_keep_their_scale(adapter, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "scaled")
    (folder / "alpacafarm_reward.json").write_text(json.dumps(SCALE | {"alpacafarm_end_with_eos": False}))
    (ids,) = RewardModel(folder).encode(["Ask"], ["fine"])
    assert [*ids, 2] == RewardModel(adapter).encode(["Ask"], ["fine"])[0]
    (folder / "alpacafarm_reward.json").write_text(json.dumps(SCALE))
    found = [RewardModel(each).score(INSTRUCTIONS, RESPONSES) for each in (folder, adapter)]
    np.testing.assert_allclose(found[0], (found[1] - 0.5) / 2, rtol=0, atol=1e-6)
    (folder / "alpacafarm_reward.json").write_text("[]")
    with pytest.raises(CheckpointError, match="JSON object"):
        RewardModel(folder)


@pytest.mark.parametrize(
    ("fault", "told"),
    [("no head", "score"), ("a matrix", "lora_A"), ("base", "nowhere"), ("base of an adapter", "adapter itself")],
)
def test_incomplete_adapters_give_no_score(adapter, tmp_path, fault, told):
    folder = shutil.copytree(adapter, tmp_path / "faulty")
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = load_file(folder / "adapter_model.safetensors")
    if fault == "no head":
        weights = {name: value for name, value in weights.items() if "score" not in name}
    elif fault == "a matrix":
        del weights[next(name for name in weights if "lora_A" in name)]
    else:
        config["base_model_name_or_path"] = str(adapter) if "adapter" in fault else str(tmp_path / "nowhere")
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=told):
        RewardModel(folder).score(["Ask"], ["fine"])


def test_half_the_memory_for_nearly_the_same_scores(tiny_model, adapter, scores):
    """By name, as a mapping has it; the head adds up in float32."""
    import torch

    for folder in (tiny_model, adapter):
        whole = RewardModel(folder).score(INSTRUCTIONS, RESPONSES)
        oracle = make_oracle({"reward_model": str(folder), "dtype": "bfloat16", "device": "cpu"}, dataset=None)
        found = oracle.score(INSTRUCTIONS, RESPONSES)
        assert 0 < np.abs(found - whole).max() < 0.2 * whole.std()
        types = {name: value.dtype for name, value in oracle._model.named_parameters()}
        assert {value for name, value in types.items() if "layers" in name and "lora" not in name} == {torch.bfloat16}
        assert {value for name, value in types.items() if "score" in name} == {torch.float32}
        assert not np.array_equal(found, found.astype(np.float16))  # finer than bfloat16 has numbers
    with pytest.raises(ValueError, match="bfloat16"):
        make_oracle({"reward_model": str(tiny_model), "dtype": "bfloat32"}, dataset=None)


def test_hub_names_are_read_from_the_cache(tiny_model, tmp_path, monkeypatch, scores):
    stored = tmp_path / "models--someone--reward"
    shutil.copytree(tiny_model, stored / "snapshots" / "abc")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    oracle = make_oracle({"reward_model": "someone/reward"}, dataset=None)
    assert oracle.name == "reward_model:reward"
    np.testing.assert_array_equal(oracle.score(INSTRUCTIONS, RESPONSES), scores)
    for read in (RewardModel, hash_model):
        with pytest.raises(CheckpointError, match=r"someone/other.*cannot be reached"):
            read("someone/other")


def test_a_prompt_of_many_responses_is_read_once(tiny_model, model, monkeypatch):
    """Scores are those of texts read whole, and the tokens that are read are far fewer."""
    asked = [each for each in ("Tell me why " * 20, "Tell me how " * 20) for _ in range(40)] + ["Alone"]
    responses = [f"{'word ' * (i % 7)}{i}" for i in range(81)]
    calls = []
    handle = model._model.register_forward_pre_hook(
        lambda _, args, inputs: calls.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    together, tokens = model.score(asked, responses), sum(calls)
    calls.clear()
    monkeypatch.setattr("alpacafarm_env.oracles.reward_model.reads_in_parts", lambda model: False)
    whole = model.score(asked, responses)
    handle.remove()
    np.testing.assert_allclose(together, whole, rtol=0, atol=1e-5)
    assert tokens < 0.6 * sum(calls)
