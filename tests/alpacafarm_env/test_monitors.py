"""Monitors: signals of a run's own metrics, a detector of other runs' falls, and callbacks that warn, stop and keep."""

import json
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3
from stable_baselines3.common.vec_env import VecMonitor

from alpacafarm_env import agents, sandbox
from alpacafarm_env.agents import sb3
from alpacafarm_env.errors import CheckpointError, DataError, UnknownNameError
from alpacafarm_env.monitors import (
    SIGNALS,
    Detector,
    Monitor,
    OveroptimizationWarning,
    agreement,
    read_run,
    repetition,
    signals,
    table_of,
    watch,
)
from alpacafarm_env.monitors.callbacks import from_trl
from alpacafarm_env.oracles import make_oracle
from alpacafarm_env.wrappers.vector import RewardAudit

STEPS = 40
ALWAYS = Detector({"distance": 0.0}, {"distance": 1.0}, {"distance": 1.0}, intercept=0.0, threshold=-1.0)
NEVER = Detector({"distance": 0.0}, {"distance": 1.0}, {"distance": 1.0}, intercept=0.0, threshold=math.inf)


def made_up(fall, seed, *, unit=1.0):
    """A run's metrics and whether gold is past its peak: lengths run away from step `fall` on (None: never)."""
    rng, rows = np.random.default_rng(seed), []
    for step in range(1, STEPS + 1):
        since = 0 if fall is None else max(0, step - fall)
        kl, length = 0.1 * step + 0.02 * since**2, 20 * unit * (1 + 0.08 * since)
        noise = rng.normal(0, 0.03, 4)
        rows.append(
            {
                "step": step,
                "kl/k1": kl + noise[0],
                "score/mean": unit * (math.sqrt(kl) + noise[1]),
                "score/std": unit,
                "tokens/mean": length * (1 + noise[2]),
                "entropy": 2.0 + noise[3],
                "finished": 0.9,
            }
        )
    return rows, np.array([fall is not None and row["step"] > fall + 3 for row in rows])


@pytest.fixture(scope="module")
def detector():
    runs = [made_up(None if seed % 2 else 10 + seed, seed) for seed in range(24)]
    return Detector.fit([table_of(run) for run, _ in runs], [past for _, past in runs])


def test_signals_are_of_the_steps_so_far_and_of_no_unit():
    run, _ = made_up(15, 0)
    whole, early = signals(run), signals(run[:20])
    assert set(whole) == set(SIGNALS)
    for name, values in whole.items():
        np.testing.assert_array_equal(values[:20], early[name])
    other = signals(made_up(15, 0, unit=7.0)[0])  # of another reward's unit, and longer
    for name in SIGNALS:
        np.testing.assert_allclose(whole[name], other[name], rtol=1e-9, atol=1e-9)
    assert np.isnan(whole["disagreement"]).all()  # no ensemble
    assert whole["distance"][-1] == pytest.approx(math.sqrt(np.mean([row["kl/k1"] for row in run[-3:]])))
    assert whole["length"][-1] > 1 > abs(whole["length"][10])
    assert whole["acceleration"][25] > 0.5
    assert all(len(values) == 1 for values in signals(run[:1]).values())


def test_a_missing_number_of_one_step_is_no_missing_signal():
    run, _ = made_up(None, 0)
    run[20]["kl/k1"] = None
    assert not np.isnan(signals(run)["distance"]).any()


@pytest.mark.parametrize(
    ("text", "share"), [("a b c d", 0.0), ("a b c a b c", 1 / 4), ("a a a a a", 2 / 3), ("", 0.0), ("one two", 0.0)]
)
def test_repetition(text, share):
    assert repetition(text) == pytest.approx(share)


def test_agreement_is_of_ranks_and_of_those_that_have_both():
    assert agreement([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert agreement([1, 2, 3, math.nan], [3, 2, 1, 0]) == pytest.approx(-1)
    assert math.isnan(agreement([1, 2], [1, 2]))
    assert math.isnan(agreement([1, 1, 1], [1, 2, 3]))


def test_a_detector_finds_falls_of_runs_it_has_not_seen(detector):
    found = []
    for fall in (12, 20, 28, None, None, None):
        run, past = made_up(fall, 1000 + (fall or len(found)), unit=3.0)
        warned = watch(run, detector)
        found.append(warned is not None)
        if fall is not None:
            assert fall < warned <= int(np.argmax(past)) + 4
    assert found == [True] * 3 + [False] * 3


def test_its_threshold_has_the_false_alarms_that_were_asked_for():
    runs = [made_up(None if seed % 4 else 12, seed) for seed in range(80)]
    fitted = Detector.fit([table_of(run) for run, _ in runs], [past for _, past in runs], false_alarms=0.2)
    alarms = [(fitted.scores(run)[~past] > fitted.threshold).any() for run, past in runs]
    assert np.mean(alarms) == pytest.approx(0.2, abs=0.02)


def test_a_signal_that_a_run_lacks_neither_warns_nor_breaks(detector):
    run, _ = made_up(12, 5)
    bare = [{name: row[name] for name in ("step", "score/mean", "score/std")} for row in run]
    assert np.isfinite(detector.scores(bare)).all()
    assert detector.scores([{"step": 1}]) == pytest.approx([detector.intercept])


def test_outcomes_may_be_numbers_and_must_be_of_the_steps(detector):
    runs = [made_up(None if seed % 2 else 10 + seed, seed) for seed in range(24)]
    tables, past = [table_of(run) for run, _ in runs], [past.astype(int).tolist() for _, past in runs]
    assert Detector.fit(tables, past) == detector
    for few, names in ((past[1:], tuple(SIGNALS)), (past, ("distance",)), ([own[1:] for own in past], tuple(SIGNALS))):
        with pytest.raises(ValueError, match="signals"):
            Detector.fit(tables, few, names=names)
    with pytest.raises(ValueError, match="false_alarms"):
        Detector.fit(tables, past, false_alarms=2)


def test_runs_of_one_kind_alone_fit_nothing():
    runs = [made_up(None, seed) for seed in range(4)]
    with pytest.raises(ValueError, match="one kind"):
        Detector.fit([table_of(run) for run, _ in runs], [past for _, past in runs])


def test_what_is_saved_says_the_same(detector, tmp_path):
    detector.save(tmp_path / "detector.json")
    run, _ = made_up(20, 3)
    loaded = Detector.load(tmp_path / "detector.json")
    np.testing.assert_array_equal(loaded.scores(run), detector.scores(run))
    assert loaded.threshold == detector.threshold
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"other\.json"):
        Detector.load(tmp_path / "other.json")


def test_a_monitor_warns_once_keeps_what_was_before_and_stops_if_asked(detector, tmp_path):
    run, _ = made_up(15, 9)
    kept = []
    monitor = Monitor(detector, keep=kept.append, keep_every=2, out=tmp_path / "run")
    with pytest.warns(OveroptimizationWarning) as caught:
        answers = [monitor(row) for row in run]
    assert (all(answers), len(caught)) == (True, 1)
    assert monitor.warned == watch(run, detector)
    assert kept == list(range(2, monitor.warned, 2))
    # What is saved after a step is what the next step's metrics are of.
    assert monitor.kept == max(step for step in kept if step + 1 < monitor.warned)
    line = json.loads((tmp_path / "run" / "warnings.jsonl").read_text())
    assert (line["step"], line["signal"] in SIGNALS) == (monitor.warned, True)
    stopping = Monitor(detector, action="stop")
    with pytest.warns(OveroptimizationWarning):
        assert [stopping(row) for row in run].index(False) + 1 == monitor.warned
    with pytest.raises(UnknownNameError, match="stop"):
        Monitor(detector, action="halt")


def test_a_monitor_of_a_resumed_run_reads_what_came_before(detector, tmp_path):
    run, _ = made_up(25, 9)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run[:12]))
    resumed, alone = Monitor(detector, out=tmp_path), Monitor(detector)
    resumed(run[10])
    with pytest.warns(UserWarning, match="from step 11 on"):
        alone(run[10])
    np.testing.assert_array_equal(resumed.scores, detector.scores(run[:11]))
    assert len(alone.scores) == 1
    with pytest.warns(UserWarning, match="from step 11 on"):
        watch(run[10:], detector)
    watch(run[9::10], detector)  # of who logs every tenth step


def test_a_trl_trainer_that_is_resumed_tells_what_came_before(detector):
    logs = [
        {"reward": 0.1 * n, "reward_std": 1.0, "kl": 0.01 * n, "completions/mean_length": 30.0} for n in range(1, 6)
    ]
    history = [{**row, "step": 10 * n} for n, row in enumerate(logs, 1)] + [{"train_runtime": 3.0, "step": 40}]
    state, monitor = SimpleNamespace(global_step=50, log_history=history), Monitor(detector)
    monitor.for_trl().on_log(None, state, SimpleNamespace(), logs=logs[-1])
    np.testing.assert_array_equal(monitor.scores, detector.scores([from_trl(row) for row in logs]))


def test_a_monitor_is_of_one_run(detector):
    run, _ = made_up(None, 9)
    monitor = Monitor(detector)
    for row in run[:3]:
        monitor(row)
    with pytest.raises(ValueError, match="after 3, got 1"):
        monitor(run[0])


def test_metrics_that_tell_nothing_are_refused_and_few_are_warned_of(detector):
    for rows in ([{"step": 1, "kl": 2.0}], [{"step": 1, "kl/k1": math.nan}], [{"kl/k1": 1.0}], []):
        with pytest.raises(DataError):
            watch(rows, detector)
    with pytest.raises(DataError, match="kl/k1"):
        Monitor(detector)({"step": 1, "loss": 1.0})  # such as of DPO
    run, _ = made_up(12, 9)
    bare = [{name: row[name] for name in ("step", "score/mean", "score/std")} for row in run]
    with pytest.warns(UserWarning, match="KL"):
        watch(bare, detector)


@pytest.mark.parametrize("wrong", [{"keep": 1}, {"keep_every": 0}, {"threshold": math.nan}, {"detector": "x"}])
def test_impossible_arguments_are_refused_before_the_run(wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        Monitor(**wrong)


@pytest.fixture(scope="module")
def audited_run(tmp_path_factory):
    """The folder of a short run of PPO with an audit of its reward."""
    out = tmp_path_factory.mktemp("run")
    env = gym.make_vec("AlpacaFarm-PPO-v0", num_envs=32, autoreset_mode="Disabled")
    env = RewardAudit(env, seconds={"gold": "gold"}, most=16)
    config = agents.PPOConfig.sandbox()
    config = type(config)(**{**vars(config), "total_steps": 3, "rollout_batch_size": 32, "minibatch_size": 32})
    agents.PPO(env, sandbox.POLICY, config=config, out=out).learn()
    return out


def test_an_agent_stops_where_its_monitor_says_so(tmp_path):
    env = gym.make_vec("AlpacaFarm-PPO-v0", num_envs=8, autoreset_mode="Disabled")
    config = agents.RLOOConfig.sandbox(total_steps=4, rollout_batch_size=8, minibatch_size=8, num_generations=4)
    agent = agents.GroupPolicy(env, sandbox.POLICY, config=config, out=tmp_path)
    with pytest.warns(OveroptimizationWarning):
        agent.learn(callback=Monitor(ALWAYS, action="stop"))
    assert agent.step == 1
    assert watch(tmp_path, ALWAYS) == 1
    assert watch(tmp_path, NEVER) is None


def test_a_folders_metrics_have_what_its_kept_responses_tell(audited_run, tmp_path):
    rows = read_run(audited_run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    told = read_run(audited_run, {name: make_oracle(name, dataset="sandbox") for name in ("surrogate", "gold")})
    for row in told:  # the proxy agrees with itself, and with gold as the audit has found by the first 16 of 32
        assert row["info/surrogate_agreement"] == pytest.approx(1)
        assert 0 < row["info/gold_agreement"] < 1
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "score/mean": 1.0}\n{"step": 2, "sco')  # of a killed run
    with pytest.warns(UserWarning, match="1 damaged"):
        assert [row["step"] for row in read_run(tmp_path)] == [1]
    with pytest.raises(DataError, match="oracles"):
        read_run(audited_run, {"gold": "gold"})
    with pytest.raises(DataError, match="metrics"):
        read_run(tmp_path / "nothing")


def test_an_audited_run_has_all_signals_that_need_texts(audited_run):
    found = signals(read_run(audited_run))
    assert not np.isnan(found["repetition"]).any()
    assert not np.isnan(found["agreement"]).any()


def test_sb3_is_warned_and_stops():
    # The user's own lines:
    envs = RewardAudit(gym.make_vec("AlpacaFarm-Token-v0", num_envs=4), seconds={"gold": "gold"})
    envs = VecMonitor(sb3.TokenVecEnv(envs), info_keywords=("repetition", "gold_reward"))
    agent = stable_baselines3.PPO(env=envs, **sb3.keywords(n_steps=64, batch_size=256, n_epochs=1, seed=0))
    monitor = Monitor(ALWAYS, action="stop")
    with pytest.warns(OveroptimizationWarning):
        agent.learn(2048, monitor.for_sb3())
    # Stopped right after the rollout that was warned of.
    assert monitor.warned == 256
    assert agent.num_timesteps < 1024
    metrics = monitor._metrics[0]
    assert {"score/mean", "score/std", "tokens/mean", "kl/k1", "info/repetition", "info/gold_reward"} <= metrics.keys()
    envs.close()


def test_trls_log_is_read_by_our_names():
    """Names as TRL 1.16's GRPOTrainer logs them; tests/agents/test_trl.py has a run."""
    logs = {"reward": 1.5, "reward_std": 0.5, "kl": 0.01, "entropy": 2.0, "completions/mean_length": 30.0}
    metrics = from_trl({**logs, "completions/clipped_ratio": 0.25, "loss": 0.1})
    assert metrics == {
        "score/mean": 1.5, "score/std": 0.5, "entropy": 2.0, "tokens/mean": 30.0, "finished": 0.75, "kl/k1": 0.3,
    }  # fmt: skip
    assert from_trl({"train_runtime": 3.0}) == {}
