"""SmolLM2-135M-Instruct for the tests marked `real`, and what commands train from it, each once a session."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from make_model import DownloadError, cached_folder, make_model

ROWS: list[dict[str, str]] = json.loads(Path(__file__).with_name("rows.json").read_text(encoding="utf-8"))
TRAIN, EVAL = ROWS[:24], ROWS[24:]
COMMON = ("--lora", "8", "--max-response-tokens", "24")
"""Else each command has its defaults, as a user has them."""


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model's folder, made where it is not in the user's cache yet."""
    try:
        return make_model(cached_folder())
    except DownloadError as error:
        pytest.skip(f"SmolLM2-135M-Instruct is not in {cached_folder()} and cannot be made: {error}")


@pytest.fixture(scope="session")
def rows() -> list[dict[str, str]]:
    """Instructions, each with a good response (`output`) and a `worse` one."""
    return ROWS


def write_data(folder: Path) -> None:
    """A data set for each kind of method, since an instruction may be in one split only."""
    pairs = [
        {"instruction": row["instruction"], "output_1": first, "output_2": second, "preference": 1 + (first != good)}
        for n, row in enumerate(TRAIN)
        for good in [row["output"]]
        for first, second in [(good, row["worse"])[:: 1 if n % 3 else -1]]
    ]
    demonstrations = [{"instruction": row["instruction"], "output": row["output"]} for row in ROWS]
    splits = {
        "demonstrations": ("sft", demonstrations[: len(TRAIN)]),
        "pairs": ("preference", pairs),
        "prompts": ("unlabeled", [{"instruction": row["instruction"]} for row in TRAIN]),
    }
    for name, (split, content) in splits.items():
        (folder / name).mkdir(parents=True)
        (folder / name / f"{split}.json").write_text(json.dumps(content), encoding="utf-8")
        (folder / name / "eval.json").write_text(json.dumps(demonstrations[len(TRAIN) :]), encoding="utf-8")


@dataclass(frozen=True)
class Run:
    """What a command left."""

    out: Path
    peak: float
    """Largest resident memory, GB; Linux counts that of the process that started it too."""

    @property
    def model(self) -> Path:
        """The policy's or reward model's folder."""
        (folder,) = [*self.out.glob("runs/*/policy"), *self.out.glob("reward_model")]
        return folder


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all data and runs."""
    folder = tmp_path_factory.mktemp("real") / "tree"
    write_data(folder / "data")
    return folder


@pytest.fixture(scope="session")
def trained(smollm2: Path, tree: Path) -> Callable[[str], Run]:
    """A function that trains by a method's command, after whatever that starts from, all within `tree`."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])

    def command(method: str, data: str, policy: str | Path, *options: str) -> Run:
        given = ["--dataset", f"data/{data}", "--policy", str(policy), "--out", method, *COMMON, *options]
        line = [sys.executable, "-m", "alpacafarm_env.benchmarks.train", method, *given]
        log = tree / f"{method}.log"
        with log.open("w") as file:
            process = subprocess.Popen(line, cwd=tree, env=environment, stdout=file, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, log.read_text()[-3000:]
        return Run(tree / method, usage.ru_maxrss * 1024 / 1e9)

    @cache
    def train(method: str) -> Run:
        once = ("--batch-size", "8", "--epochs", "1")
        if method == "sft":
            return command(method, "demonstrations", smollm2, *once)
        policy = train("sft").model.relative_to(tree)
        if method != "ppo":
            return command(method, "pairs", policy, *once)
        reward = ("--reward-model", str(train("reward_modeling").model.relative_to(tree)), "--save", "adapter")
        sizes = ("--rollout-batch-size", "8", "--minibatch-size", "8", "--steps", "2")
        return command(method, "prompts", policy, *reward, *sizes)

    return train


@pytest.fixture
def moved(
    trained: Callable[[str], Run], tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Path]]:
    """A function that gives the folder of what a method trained, moved with all of `tree`; we are elsewhere."""
    place = tmp_path / "moved"

    def move(method: str) -> Path:
        model = trained(method).model.relative_to(tree)
        tree.rename(place)
        monkeypatch.chdir(tmp_path)
        return place / model

    yield move
    if place.exists():  # not where the test was skipped
        place.rename(tree)
