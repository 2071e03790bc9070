"""The win-rate curve on a made-up folder of recorded judgements, with a tiny policy."""

import json
from dataclasses import replace

import numpy as np
import pytest
from written import rows_of

from alpacafarm_env.benchmarks.experiment.own_judge import LEARNED_GOLD, make_own_judge
from alpacafarm_env.benchmarks.surrogates.gold import LearnedGold
from alpacafarm_env.benchmarks.win_rate_curve.__main__ import WinRateCurveOptions, make_plans, run
from alpacafarm_env.data import load_dataset
from alpacafarm_env.data.load import training_dataset
from alpacafarm_env.data.recorded import PARTS, reference_digest
from alpacafarm_env.errors import CheckpointError, DataError

NUM, MODELS = 60, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sixty instructions and five models; the judge prefers longer responses than the reference's three words."""
    folder = tmp_path_factory.mktemp("recorded")
    fields = [{"instruction": f"Tell me of thing {i}.", "input": "Now." if i % 4 == 0 else ""} for i in range(NUM)]
    asked = [{"index": i, **each} for i, each in enumerate(fields)]
    reference = [{**row, "output": "It is nice.", "generator": "reference"} for row in asked]
    write(folder / "eval_instructions.jsonl", asked)
    write(folder / "davinci003.jsonl", reference)
    (folder / "outputs").mkdir()
    verdicts = []
    for model in range(MODELS):
        texts = [" ".join(["word"] * (1 + (i * 7 + model * 3) % 9)) for i in range(NUM)]
        rows = [{**row, "output": text, "generator": f"m{model}"} for row, text in zip(asked, texts, strict=True)]
        write(folder / "outputs" / f"outputs_m{model}.jsonl", rows)
        verdicts += [
            {"index": i, "generator": f"m{model}", "preference": None if i == 1 else float(len(text) > 25)}
            for i, text in enumerate(texts)
        ]
    write(folder / "preferences_judge.jsonl", verdicts)
    merged = [f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"] for row in asked]
    digest = reference_digest(merged, ["It is nice."] * NUM)
    (folder / "recorded.json").write_text(json.dumps({"reference_sha256": digest}), encoding="utf-8")
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


FEW = """--quick --seeds 2 --steps 2 --evaluate-every 1 --max-response-tokens 5 --reward-pairs 40
--reward-tokens 100 --rollout-batch-size 8 --minibatch-size 4 --num-eval 6 --num-val 4"""


@pytest.fixture
def words(folder, own_models, tmp_path):
    return ["--dataset", str(folder), "--policy", str(own_models[0]), "--out", str(tmp_path / "out"), *FEW.split()]


def test_parts_share_no_instruction_and_verdicts_are_of_one(folder):
    data = training_dataset(folder)
    parts = {split: set(data.instructions(split)) for split in data.splits}
    assert set(parts) == set(PARTS)
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == NUM - 1  # one was never judged
    verdicts = load_dataset(folder).recorded_verdicts()
    pairs = data.preferences()
    assert {pair.instruction for pair in pairs} <= parts["preference"]
    assert all(verdicts[pair.instruction, pair.responses[0]] == (pair.preference == 1) for pair in pairs)
    assert load_dataset(folder).splits == ("eval",)  # a leaderboard still has all of them


def test_gold_learns_the_verdicts_of_other_instructions(folder):
    data = training_dataset(folder)
    gold = LearnedGold(data)
    judge = make_own_judge(LEARNED_GOLD, data)
    asked = data.instructions("eval")
    short, long = (judge.score(asked, [text] * len(asked)) for text in ("word", "word word word word word word word"))
    assert gold.accuracy > 0.9
    assert np.all((short >= 0) & (long <= 1))
    assert long.mean() > 0.8 > 0.2 > short.mean()
    assert np.all(judge.score(asked, data.references("eval")) == 0.5)


def test_gold_needs_a_recorded_folder(own_data):
    with pytest.raises(DataError, match=r"--judge: .*recorded folder"):
        make_own_judge(LEARNED_GOLD, load_dataset(own_data))


def test_the_whole_command_on_recorded_data(words, capsys):
    options = WinRateCurveOptions.parse(words)
    assert run(options) == 0
    table, manifest = rows_of(options.out), json.loads((options.out / "manifest.json").read_text(encoding="utf-8"))
    assert [(row["seed"], row["step"]) for row in table] == [(s, t) for s in "01" for t in "012"]
    assert all(0 < float(row["win_rate"]) < 100 for row in table)
    first, last = ([row["proxy"] for row in table if row["step"] == step] for step in "02")
    assert first != last
    assert manifest["complete"]
    assert manifest["facts"]["level"] == "recorded (learned gold)"
    assert (manifest["config"]["reward_pairs"], manifest["config"]["reward_tokens"]) == (40, 100)
    assert (options.out / "reward_model" / "config.json").is_file()
    page = (options.out / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2
    assert "recorded (learned gold)" in page
    assert "recorded verdicts" in capsys.readouterr().out

    before = (options.out / "table.csv").read_bytes()
    assert run(options) == 0  # the reward model, too, is there
    assert (options.out / "table.csv").read_bytes() == before
    with pytest.raises(CheckpointError, match="reward_pairs was 40, is 41"):
        run(replace(options, reward_pairs=41))


def test_own_reward_model_and_judge_stand_in(words, own_models):
    own = ["--reward-model", str(own_models[1]), "--judge", "constant"]
    options = WinRateCurveOptions.parse([*words, *own])
    (plan, *_) = make_plans(options)
    assert not options.learns_reward
    assert (plan.reward, plan.judge) == (str(own_models[1]), "constant")


def test_defaults_of_a_recorded_folder_give_way(words):
    few = WinRateCurveOptions.parse([*words[:4], "--steps", "3"])
    assert (few.steps, few.rollout_batch_size, few.max_response_tokens) == (3, 64, 96)
    assert WinRateCurveOptions.parse([]).rollout_batch_size is None
