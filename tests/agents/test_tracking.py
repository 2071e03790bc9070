"""Callbacks and experiment trackers of `learn`: what they are told, and that a run they end goes on."""

from pathlib import Path
from typing import Any

import accelerate.tracking
import numpy as np
import pytest
from agent_worlds import RUNS, files
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_worlds import TEMPLATE, build_llama, build_tokenizer
from world_jobs import Recorder

from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.errors import TrackerError, UnknownNameError

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


def logged(folder: Path) -> list[int]:
    """The steps in all event files. Each is read by itself: tensorboard takes those of one second in order of name."""
    boards = [EventAccumulator(str(file)).Reload() for file in folder.rglob("events.out.tfevents.*")]
    losses = (board.Scalars("loss") for board in boards if "loss" in board.Tags()["scalars"])
    return sorted(event.step for events in losses for event in events)


def test_tensorboard_has_every_step_of_a_run_that_was_stopped(policy: Path, tmp_path: Path) -> None:
    agent = sft(policy, tmp_path)
    agent.learn(trackers="tensorboard", callback=lambda metrics: metrics["step"] < 3)
    assert logged(tmp_path) == [1, 2, 3]
    agent.learn()
    assert logged(tmp_path) == [1, 2, 3, 4, 5, 6]
