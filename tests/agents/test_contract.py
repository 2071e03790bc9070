"""The promises of every agent, the guide's agent of one's own among them.

A trained agent's `updates` end after at least four steps, and its checkpoints are written every second one.
"""

import json
import math
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import accelerate.tracking
import numpy as np
import pytest
import torch
from agent_worlds import ACTORS, EXACT, RUNS, Recorder, files, train_and_disagree
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_worlds import TEMPLATE, TEXTS, build_llama, build_tokenizer, finish, start_world

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.data.files import read_records
from alpacafarm_env.errors import TrackerError, UnknownNameError
from alpacafarm_env.monitors.runs import ROLLOUTS

TRAINED = [name for name in ACTORS if name != "best_of_n"]
GREEDY = [name for name in TRAINED if name not in ("expert_iteration", "reinforce")]
"""Those whose config says how `act` samples."""

ATOL = dict.fromkeys(EXACT, 1e-6) | {"expert_iteration": 2e-4}  # its many steps make more of rounding


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two saved policies that differ."""
    folders = [tmp_path_factory.mktemp("policy") for _ in range(2)]
    for seed, folder in enumerate(folders):
        tokenizer = build_tokenizer()
        LanguageModel(build_llama(len(tokenizer), seed=seed), tokenizer, TEMPLATE).save(folder)
    return folders


@pytest.mark.parametrize("name", ACTORS)
def test_a_response_an_instruction_which_the_seed_decides(name: str, policies: list[Path]) -> None:
    make, policy = ACTORS[name], policies[0]
    agent = make(policy)
    answers = agent.act(TEXTS)
    assert len(answers) == len(TEXTS)
    assert all(isinstance(answer, str) for answer in answers)
    assert agent.act(TEXTS) == answers == make(policy).act(list(TEXTS))
    assert make(policy, seed=1).act(TEXTS) != answers
    assert agent.act(()) == ()
    with pytest.raises(TypeError, match=r"list"):
        agent.act("Hi")  # not an answer to each letter


@pytest.mark.parametrize("name", [*GREEDY, "best_of_n"])
def test_an_answer_stands_in_its_instructions_place_and_depends_on_no_other(name: str, policies: list[Path]) -> None:
    """Best-of-n promises it, greedy agents too."""
    make = partial(ACTORS[name], policies[0], **({"act_temperature": 0.0} if name in GREEDY else {}))
    answers = make().act(TEXTS)
    assert len(set(answers)) > 1
    assert make().act(TEXTS[::-1]) == answers[::-1]
    assert tuple(make().act([text])[0] for text in TEXTS) == answers


@pytest.mark.parametrize("name", ACTORS)
def test_what_is_saved_answers_the_same(name: str, policies: list[Path], tmp_path: Path) -> None:
    """Read into an agent that began elsewhere, and as a policy to begin with."""
    make, (policy, other_policy) = ACTORS[name], policies
    agent, loaded = make(policy), make(other_policy)
    list(getattr(agent, "updates", tuple)())
    agent.save(tmp_path / "saved")
    answers = agent.act(TEXTS)
    assert loaded.act(TEXTS) != answers
    loaded.load(tmp_path / "saved")
    assert loaded.act(TEXTS) == make(tmp_path / "saved").act(TEXTS) == answers


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str, policies: list[Path]) -> None:
    """Steps are counted, metrics are numbers, the model moves; equal seeds train equally, another one does not."""
    make, policy = ACTORS[name], policies[0]
    agent = make(policy)
    before = {name: tensor.clone() for name, tensor in agent.policy.model.state_dict().items()}
    first = list(agent.updates())
    assert [metrics["step"] for metrics in first] == list(range(1, len(first) + 1))
    assert all(math.isfinite(value) for metrics in first for value in metrics.values())
    assert any(not torch.equal(before[name], tensor) for name, tensor in agent.policy.model.state_dict().items())
    assert list(make(policy).updates()) == first != list(make(policy, seed=1).updates())


@pytest.mark.parametrize("name", RUNS)
def test_a_run_stopped_one_step_beyond_a_checkpoint_leaves_the_files_of_a_whole_one(
    name: str, policies: list[Path], tmp_path: Path
) -> None:
    make, policy, stop = RUNS[name], policies[0], 3
    whole = int(make(policy, tmp_path / "whole").learn()["step"])
    for metrics in make(policy, tmp_path / "parts").updates():
        if metrics["step"] == stop:
            break
    found = make(policy, tmp_path / "parts").learn(callback=lambda metrics: False)["step"]
    assert found in (stop, stop + 1)  # samples may be kept every step
    steps = [metrics["step"] for metrics in make(policy, tmp_path / "parts").updates()]
    assert steps == list(range(int(found) + 1, whole + 1))  # a callback that stops a run has it saved
    assert make(policy, tmp_path / "parts").learn() == {}
    first, second = files(tmp_path / "parts"), files(tmp_path / "whole")
    both = first.keys() & second.keys()  # another checkpoint may be kept beside the last one
    assert {name: first[name] for name in both} == {name: second[name] for name in both}
    assert {Path(name).name for name in both} == {Path(name).name for name in second} != set()


def test_some_responses_of_each_step_are_kept_as_they_were_scored(policies: list[Path], tmp_path: Path) -> None:
    for number in (3, 0):
        out = tmp_path / str(number)
        metrics = list(RUNS["ppo"](policies[0], out, keep_rollouts=number).updates())
        rows: list[Any] = read_records(out / ROLLOUTS) if number else []
        assert [row["step"] for row in rows] == [step["step"] for step in metrics for _ in range(number)]
        assert all({"instruction", "response", "score", "tokens", "finished", "info"} <= row.keys() for row in rows)
        assert (out / ROLLOUTS).exists() == bool(number)
    whole = list(RUNS["ppo"](policies[0], tmp_path / "whole").updates())
    kept: list[Any] = read_records(tmp_path / "whole" / ROLLOUTS)
    for metrics in whole:  # fewer than 64 in a step: all of them
        scores = [row["score"] for row in kept if row["step"] == metrics["step"]]
        assert np.mean(scores) == pytest.approx(metrics["score/mean"])


@pytest.fixture(scope="module")
def world(policies: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[BaseProcess], Path]:
    """Two processes that train every agent, then disagree, and where they write."""
    out = tmp_path_factory.mktemp("world")
    return start_world(train_and_disagree, policies[0], out, size=2), out


def test_two_processes_train_as_one(
    policies: list[Path], tmp_path: Path, world: tuple[list[BaseProcess], Path]
) -> None:
    started, two = world
    for name, make in {**RUNS, **EXACT}.items():
        make(policies[0], tmp_path / name, seed=2).learn()
    finish(started)
    for name, make in {**RUNS, **EXACT}.items():
        check_same_training(tmp_path / name, two / name, atol=ATOL.get(name, 5e-6))
        assert make(policies[0], two / name, seed=2).learn() == {}  # one process goes on where two have stopped


def test_one_process_stops_all_and_the_main_one_tracks(world: tuple[list[BaseProcess], Path]) -> None:
    started, out = world
    finish(started)
    assert [(out / f"stopped-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    assert (out / "tracked-0").read_text() == "[1, 2]"
    assert not (out / "tracked-1").exists()


def test_processes_that_differ_are_all_told_how(world: tuple[list[BaseProcess], Path]) -> None:
    started, out = world
    finish(started)
    first, second = ((out / f"told-{rank}").read_text().splitlines() for rank in (0, 1))
    expected = ["learning_rate", "out", "newest checkpoint", "resume='never'", "num_envs"]
    expected += ["wrappers", "responses", "demonstrations", "instructions_sha256", "out of money", "of money"]
    for told in (first, second):
        assert [line.split(" -> ")[0] for line in told] == expected
        assert all(name in line.split(" -> ")[1] for name, line in zip(expected, told, strict=True))


def check_same_training(one: Path, two: Path, *, atol: float) -> None:
    """Two runs say and leave the same, weights within `atol`."""
    named = {path.relative_to(one) for path in one.rglob("*") if path.name in ("metrics.jsonl", "model.safetensors")}
    assert {path.suffix for path in named} == {".jsonl", ".safetensors"}
    rollouts = [[row["response"] for row in read_records(path)] for path in sorted(one.glob(ROLLOUTS))]
    assert [[row["response"] for row in read_records(path)] for path in sorted(two.glob(ROLLOUTS))] == rollouts
    for path in named:
        if path.suffix == ".jsonl":
            lines = [[json.loads(line) for line in (run / path).read_text().splitlines()] for run in (two, one)]
            for found, expected in zip(*lines, strict=True):
                if abs(expected.get("margin", 1.0)) < 1e-5:  # before its first update DPO orders pairs by rounding
                    _ = found.pop("accuracy", None), expected.pop("accuracy", None)
                assert found == pytest.approx(expected, rel=1e-3, abs=1e-3), path
        else:
            found, expected = load_file(two / path), load_file(one / path)
            for name, tensor in expected.items():
                gap = (found[name] - tensor).abs()
                # Where a gradient is rounding alone, Adam makes a step of it: on some CPUs a single weight of a tensor.
                assert gap.max() <= (atol if atol <= 1e-6 else 2e-4), f"{path}: {name}"
                assert (gap > atol).sum() <= 1, f"{path}: {name}"


sft, expert_iteration = RUNS["sft"], RUNS["expert_iteration"]  # six steps, and two rounds of three and four


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = build_tokenizer()
    LanguageModel(build_llama(len(tokenizer)), tokenizer, TEMPLATE).save(folder)
    return folder


def test_a_callback_is_given_every_step_and_changes_nothing(policy: Path, tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    def callback(metrics: dict[str, float]) -> None:
        seen.append(dict(metrics))
        lines = (tmp_path / "told" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == metrics["step"]  # on disk by then
        metrics.clear()

    last = sft(policy, tmp_path / "told").learn(callback=callback)
    assert seen == list(sft(policy, tmp_path / "plain").updates())
    assert last == seen[-1]
    assert files(tmp_path / "told") == files(tmp_path / "plain") != {}


@pytest.mark.parametrize("stop", [1, 4])
def test_expert_iteration_stops_in_sampling_and_in_fine_tuning(policy: Path, tmp_path: Path, stop: int) -> None:
    last = expert_iteration(policy, tmp_path).learn(callback=lambda metrics: np.less(metrics["step"], stop))
    assert last["step"] == stop
    assert next(iter(expert_iteration(policy, tmp_path).updates()))["step"] == stop + 1


class TroubleError(Exception):
    """Somebody's own."""


def test_what_a_callback_or_tracker_raises_is_raised_and_the_run_goes_on(policy: Path, tmp_path: Path) -> None:
    def callback(metrics: dict[str, float]) -> None:
        if metrics["step"] == 3:
            raise TroubleError

    class Bad(Recorder):
        def log(self, values: dict[str, Any], step: int | None) -> None:
            raise TroubleError

    recorder = Recorder()
    with pytest.raises(TroubleError):
        sft(policy, tmp_path / "run").learn(callback=callback, trackers=recorder)
    assert (list(recorder.steps), recorder.finished) == ([1, 2, 3], 1)
    with pytest.raises(TroubleError):
        sft(policy, tmp_path / "run").learn(trackers=[Bad()])
    agent = sft(policy, tmp_path / "run")
    assert agent.step == 2  # of the last checkpoint
    agent.learn()
    sft(policy, tmp_path / "whole").learn()
    assert files(tmp_path / "run") == files(tmp_path / "whole") != {}


def test_trackers_are_given_settings_and_steps_and_end_with_the_run(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "trackio", Recorder)
    available = [*accelerate.tracking.get_available_trackers(), "trackio"]
    monkeypatch.setattr("alpacafarm_env.agents.tracking.get_available_trackers", lambda: available)
    own, made = Recorder(), Recorder.made
    made.clear()
    agent = expert_iteration(policy, tmp_path)
    agent.learn(trackers=["trackio", own], callback=lambda metrics: metrics["step"] < 4)
    (named,) = made
    assert named.project == "alpacafarm-env"
    for recorder in (named, own):
        assert (recorder.started, recorder.finished, list(recorder.steps)) == (1, 1, [1, 2, 3, 4])
        assert recorder.settings["seed"] == 3
        assert recorder.settings["sft.learning_rate"] == 3e-3
        assert {type(value) for value in recorder.settings.values()} <= {int, float, str, bool}
        assert recorder.steps[1]["reward/mean"] > 0
    agent.learn(trackers=own)
    assert list(own.steps) == list(range(1, agent.step + 1))
    agent.learn(trackers=own)
    assert (own.started, own.finished) == (2, 2)  # nothing was left to do


def test_a_tracker_that_cannot_be_is_told_before_training(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alpacafarm_env.agents.tracking.get_available_trackers", lambda: ["tensorboard"])
    agent = sft(policy)
    for trackers, error, fact in (
        ("wandb", TrackerError, "Install wandb"),
        (["tensorboard"], TrackerError, "out"),
        (["wandbb"], UnknownNameError, "'wandb'"),
    ):
        with pytest.raises(error, match=fact):
            agent.learn(trackers=trackers)
    with pytest.raises(TypeError, match="callback.* 5"):
        agent.learn(callback=5)
    assert agent.step == 0


def test_tensorboard_is_written_into_the_runs_folder(policy: Path, tmp_path: Path) -> None:
    sft(policy, tmp_path).learn(trackers="tensorboard", callback=lambda metrics: metrics["step"] < 3)
    board = EventAccumulator(str(tmp_path / "alpacafarm-env")).Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3]
