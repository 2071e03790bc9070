"""Data and models as people have them: a file of 35 rows is enough, and instruct folders need no edit."""

import json
import re
from pathlib import Path

import pytest
from written import rows_of

from alpacafarm_env.benchmarks import train
from alpacafarm_env.benchmarks.methods.job import Job
from alpacafarm_env.benchmarks.methods.methods import REWARD_MODELING, check_splits, find_method, hold_out
from alpacafarm_env.data import FolderDataset, load_dataset
from alpacafarm_env.errors import DataError

ROOT = Path(__file__).parents[2]
TURNS = [("human", "Say {}."), ("gpt", "Yes {}.")]
ROWS = {
    "sft": lambda i: {"conversations": [{"from": who, "value": text.format(i)} for who, text in TURNS]},
    "preference": lambda i: {"prompt": f"Try {i // 5}.", "chosen": "Yes.", "rejected": "No."},
    "unlabeled": lambda i: {"messages": [{"role": "user", "content": f"Ask {i}."}]},
}
"""Formats of other libraries; of the pairs each stands there five times."""
LEARN = ("sft", "dpo", "reward_conditioning", "ppo", "expert_iteration")
SIZES = {
    "ppo": ["--steps", 1, "--rollout-batch-size", 8, "--minibatch-size", 8],
    "expert_iteration": ["--num-instructions", 8],
}


@pytest.fixture
def files(tmp_path):
    """A file of 35 rows for each split to learn from, called as its owner likes."""
    for split, row in ROWS.items():
        text = "".join(json.dumps(row(i)) + "\n" for i in range(35))
        (tmp_path / f"my_{split}.jsonl").write_text(text)
    return {split: tmp_path / f"my_{split}.jsonl" for split in ROWS}


@pytest.fixture
def command(own_models, tmp_path):
    """Trains by a method on a file or folder."""
    policy, reward = own_models

    def run(method, data, *options):
        given = ["--policy", policy, "--preset", "sandbox", "--out", tmp_path / "out", "--max-response-tokens", 16]
        given += ["--reward-model", reward] if method != REWARD_MODELING else []
        return train.run(train.parse([method, *map(str, [*given, "--quick", "--dataset", data, *options])]))

    return run


@pytest.mark.filterwarnings("ignore:.*judge a pair that stands above:UserWarning")
@pytest.mark.parametrize("method", LEARN)
def test_a_file_is_enough_to_train_and_what_was_not_evaluated_is_said(method, files, command, tmp_path, capsys):
    assert command(method, files[find_method(train.SPECS[method]).learns_from], *SIZES.get(method, ())) == 0
    assert "nothing was evaluated" in capsys.readouterr().out
    out = tmp_path / "out"
    assert list(out.glob("runs/*/policy"))
    assert rows_of(out)[0]["method"] == method
    assert not (out / "outputs.json").exists()


@pytest.mark.filterwarnings("ignore:.*judge a pair that stands above:UserWarning")
def test_a_reward_model_of_repeated_pairs_is_tested_on_other_instructions(files, command, tmp_path):
    assert command(REWARD_MODELING, files["preference"]) == 0
    (row,) = rows_of(tmp_path / "out")
    assert (row["num_train"], row["num_test"]) == ("30", "5")
    parts = hold_out(load_dataset(files["preference"]).preferences())
    assert len({frozenset(str(each.instruction) for each in part) for part in parts}) == 2
    assert not set.intersection(*({str(each.instruction) for each in part} for part in parts))


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("method", "split", "missing", "options"),
    [
        ("sft", "unlabeled", "'sft'", []),
        ("dpo", "sft", "'preference'", []),
        (REWARD_MODELING, "sft", "'preference'", []),
        ("ppo", "sft", "'unlabeled'", []),
        ("best_of_n", "unlabeled", "'eval'", []),
        ("sft", "sft", "'eval'.*--judge", ["--judge", "constant"]),
    ],
)
def test_a_missing_split_is_told_before_anything_is_done(
    dry, method, split, missing, options, files, command, tmp_path
):
    with pytest.raises(DataError, match=missing):
        command(method, files[split], *options, *dry)
    assert not (tmp_path / "out").exists()


class Recorder(FolderDataset):
    """Notes which splits are asked for."""

    def __init__(self, path):
        super().__init__(path)
        self.splits_read = set()

    def _split(self, name):
        self.splits_read.add(name)
        return super()._split(name)


def documented():
    """Method -> the split it learns from, by the table of the page."""
    page = (ROOT / "docs" / "guides" / "own_data.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*`) \| (\S+) \| .* \|$", page.split("## Which method")[1], re.MULTILINE)
    return {name: split.strip("`") for names, split in rows for name in re.findall(r"`(\w+)`", names)}


def test_the_page_says_of_every_method_which_split_it_learns_from_and_it_asks_for_no_other(own_models, tmp_path):
    table, (policy, reward) = documented(), map(str, own_models)
    assert table.keys() == train.SPECS.keys() - {"sft_52k", "base"}  # which are of the sandbox
    for split, row in ROWS.items():
        (tmp_path / f"{split}.json").write_text(json.dumps([row(5 * i) for i in range(7)]))
    for name in table.keys() - {REWARD_MODELING}:
        job = Job(seed=0, folder=tmp_path / name, quick=True, dataset=str(tmp_path), sft=policy, reward=reward)
        data = job.__dict__["data"] = Recorder(tmp_path)  # in the place of the cached property
        method = find_method(train.SPECS[name])
        method.make(job)
        assert data.splits_read == {method.learns_from} - {""}
        assert table[name] == (method.learns_from or "nothing")
    data = load_dataset(tmp_path)
    check_splits(REWARD_MODELING, data, judged=False)
    assert table[REWARD_MODELING] == "preference"
