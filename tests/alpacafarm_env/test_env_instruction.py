"""InstructionEnv: the contract with Gymnasium, the errors, info and rendering."""

import copy
import json
import math
import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import NameNotFound, ResetNeeded
from gymnasium.utils.env_checker import check_env

from alpacafarm_env.envs.instruction import InstructionEnv
from alpacafarm_env.envs.registration import IDS, TEXT_IDS, register_envs
from alpacafarm_env.errors import (
    DataError,
    InvalidResponseError,
    InvalidResponseTypeError,
    UnknownNameError,
    UnscoredError,
)
from alpacafarm_env.instructions import Instruction
from alpacafarm_env.oracles.base import Verdicts
from alpacafarm_env.spaces import MAX_TEXT_LENGTH


@pytest.fixture
def env(tiny_dataset, counting_oracle):
    return InstructionEnv(tiny_dataset, oracle=counting_oracle)


class Undecided:
    """Has no verdict until told otherwise."""

    name = "undecided"
    verdict = math.nan

    def judge(self, instructions, responses):
        scores = np.full(len(responses), self.verdict)
        return Verdicts(scores, {"unscored_reason": np.full(len(responses), "never judged", dtype=object)})

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores


# --- The contract with Gymnasium -------------------------------------------------------------------------------------


@pytest.mark.parametrize("oracle", [{"oracle": "constant"}, {}], ids=["constant", "default"])
@pytest.mark.parametrize("id", TEXT_IDS)
def test_check_env_without_a_warning(id, oracle, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make(id, **oracle).unwrapped)


def test_ids_are_registered_once():
    assert set(IDS) <= gym.registry.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_envs()


def test_an_id_can_name_the_module_that_registers_it():
    program = (
        "import gymnasium; print(gymnasium.make('alpacafarm_env:AlpacaFarm-PPO-v0', oracle='constant').spec.kwargs)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str({"split": "unlabeled", "oracle": "constant"})


def test_an_unknown_id_is_answered_with_the_closest():
    with pytest.raises(NameNotFound, match="AlpacaFarm-WinRate"):
        gym.make("AlpacaFarm-WinRat-v0")


@pytest.mark.parametrize("id", IDS)
def test_spec_survives_json(id):
    spec = gym.spec(id)
    assert EnvSpec.from_json(spec.to_json()) == spec


def test_spec_of_an_environment_rebuilds_it(tmp_path):
    env = gym.make("AlpacaFarm-Gold-v0", oracle={"name": "constant", "value": 2.5}, split="eval")
    again = gym.make(EnvSpec.from_json(json.dumps(json.loads(env.spec.to_json()))))
    assert again.unwrapped.split == "eval"
    observations = [made.reset(seed=5)[0] for made in (env, again)]
    assert observations[0] == observations[1]
    assert again.step("anything")[1] == 2.5


def test_spec_does_not_copy_an_oracle_that_was_given_by_name():
    env = gym.make("AlpacaFarm-PPO-v0", oracle="constant")
    oracle = env.unwrapped.oracle
    spec = copy.deepcopy(env.spec)
    assert spec.kwargs["oracle"] == "constant"
    assert spec.make().unwrapped.oracle is oracle  # memoised by name: one model a process


def test_spec_does_not_copy_an_oracle_object(tiny_dataset, constant_oracle):
    env = gym.make("AlpacaFarm-PPO-v0", dataset=tiny_dataset, oracle=constant_oracle)
    assert copy.deepcopy(env.spec).kwargs["oracle"] is constant_oracle


# --- Episodes --------------------------------------------------------------------------------------------------------


def test_an_episode(env, counting_oracle):
    instruction, info = env.reset(seed=0)
    assert isinstance(instruction, Instruction)
    assert info == {"instruction_id": instruction.id, "split": "unlabeled"}
    observation, reward, terminated, truncated, info = env.step("Hello, wörld!")
    assert observation is instruction
    assert reward == len("Hello, wörld!") / 8 - len(instruction) / 64
    assert (type(reward), terminated, truncated) == (float, True, False)
    assert counting_oracle.calls == [1]
    assert info == {
        "instruction_id": instruction.id,
        "split": "unlabeled",
        "response": "Hello, wörld!",
        "response_length": 13,
        "oracle": "counting",
        "scored": True,
        "reward_components": {"counting": reward},
    }
    assert {key: type(value) for key, value in info.items()} == {
        "instruction_id": int,
        "split": str,
        "response": str,
        "response_length": int,
        "oracle": str,
        "scored": bool,
        "reward_components": dict,
    }


def test_a_seed_fixes_the_instructions(env, tiny_dataset, constant_oracle):
    def ask(env, seed):
        return [env.reset(seed=seed)[0], *(env.reset()[0] for _ in range(80))]

    first = ask(env, 3)
    assert ask(env, 3) == first
    assert ask(env, 4) != first
    assert ask(InstructionEnv(tiny_dataset, oracle=constant_oracle), 3) == first
    assert set(first) == set(tiny_dataset.instructions("unlabeled"))


def test_the_stream_follows_a_generator_assigned_by_the_user(env):
    env.reset(seed=1)
    env.np_random = np.random.default_rng(8)
    first = [env.reset()[0] for _ in range(5)]
    env.np_random = np.random.default_rng(8)
    assert [env.reset()[0] for _ in range(5)] == first


def test_an_instruction_can_be_chosen_and_draws_nothing(env):
    env.reset(seed=2)
    expected = env.reset()[0]
    env.reset(seed=2)
    assert env.reset(options={"instruction_id": 107})[1]["instruction_id"] == 107
    assert env.reset(options={"instruction_id": np.int64(100)})[0].id == 100
    assert env.reset()[0] == expected


def test_step_needs_a_reset(env):
    with pytest.raises(ResetNeeded):
        env.step("too early")
    env.reset()
    env.step("fine")
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step("one too many")


def test_the_environment_can_be_copied_between_episodes(env):
    env.reset(seed=6)
    twin = copy.deepcopy(env)
    assert [env.reset()[0] for _ in range(100)] == [twin.reset()[0] for _ in range(100)]


# --- Responses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "response", ["", " \n", "x" * 2**20, "日本語 🙂\x00"], ids=["empty", "blank", "megabyte", "unicode"]
)
def test_every_text_is_scored_as_it_is(env, response):
    env.reset(seed=0)
    *_, info = env.step(response)
    assert info["scored"]
    assert info["response"] == response
    assert info["response_length"] == len(response)


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (3, InvalidResponseTypeError, "got int: 3"),
        (None, InvalidResponseTypeError, "got NoneType"),
        (b"bytes", InvalidResponseTypeError, "got bytes: b'bytes'"),
        (["a"], InvalidResponseTypeError, "got list"),
        ("ab\ud83dc", InvalidResponseError, r"lone surrogate '\\ud83d' at position 2"),
        ("x" * (MAX_TEXT_LENGTH + 1), InvalidResponseError, "at most 1048576 code points, got 1048577"),
    ],
)
def test_other_responses_are_refused_and_the_episode_stays_open(env, counting_oracle, response, error, message):
    env.reset(seed=0)
    with pytest.raises(error, match=message):
        env.step(response)
    assert counting_oracle.calls == []
    assert env.step("now a text")[2] is True


# --- No verdict ------------------------------------------------------------------------------------------------------


def test_no_verdict_raises_and_leaves_the_episode_open(tiny_dataset):
    oracle = Undecided()
    env = InstructionEnv(tiny_dataset, oracle=oracle)
    instruction, _ = env.reset(options={"instruction_id": 103})
    with pytest.raises(UnscoredError, match=r"'undecided' gave no verdict on 1 of 1 .* instruction 103.*never judged"):
        env.step("A response.")
    oracle.verdict = 0.25
    observation, reward, terminated, *_ = env.step("A response.")
    assert (observation, reward, terminated) == (instruction, 0.25, True)


def test_no_verdict_can_truncate(tiny_dataset):
    env = InstructionEnv(tiny_dataset, oracle=Undecided(), on_unscored="truncate")
    env.reset()
    _, reward, terminated, truncated, info = env.step("A response.")
    assert math.isnan(reward)  # never a number, which would be a statement about the response
    assert (terminated, truncated, info["scored"]) == (False, True, False)
    assert info["unscored_reason"] == "never judged"
    with pytest.raises(ResetNeeded):
        env.step("again")


def test_an_oracle_that_fails_leaves_the_episode_open(tiny_dataset, counting_oracle):
    class Broken:
        name = "broken"

        def score(self, instructions, responses):
            raise OSError("endpoint unreachable")

    env = InstructionEnv(tiny_dataset, oracle=Broken())
    env.reset()
    with pytest.raises(OSError, match="unreachable"):
        env.step("A response.")
    with env.scored_by(counting_oracle):
        assert env.step("A response.")[2] is True


# --- Who scores ------------------------------------------------------------------------------------------------------


def test_the_outermost_decides_and_the_own_oracle_is_not_even_built(tiny_dataset, make_counting_oracle):
    outer, inner = make_counting_oracle("outer"), make_counting_oracle("inner")
    env = InstructionEnv(tiny_dataset, oracle="surrogate")  # a data set without one: building it would raise
    env.reset()
    with env.scored_by(outer), env.scored_by(inner):
        *_, info = env.step("A response.")
    assert (info["oracle"], outer.calls, inner.calls) == ("outer", [1], [])
    env.reset()
    with pytest.raises(DataError, match="surrogate reward model"):
        env.step("A response.")


def test_who_scores_holds_for_the_context_only(env, make_counting_oracle, counting_oracle):
    env.reset()
    with pytest.raises(ZeroDivisionError), env.scored_by(make_counting_oracle("outer")):
        raise ZeroDivisionError
    assert env.step("A response.")[4]["oracle"] == "counting"


def test_a_second_score_is_reported_beside_an_untouched_reward(env, counting_oracle, make_counting_oracle):
    other = make_counting_oracle("other", scale=3.0)
    env.reset(options={"instruction_id": 101})
    reward = env.step("A response.")[1]
    env.reset(options={"instruction_id": 101})
    with env.also_scored_by("gold_reward", other), env.also_scored_by("again", counting_oracle):
        _, same, *_, info = env.step("A response.")
    assert same == reward
    assert info["gold_reward"] == 3 * reward
    assert info["again"] == reward
    assert (counting_oracle.calls, other.calls) == (
        [1, 1],
        [1],
    )  # the deciding oracle's answer is read, not asked again


@pytest.mark.parametrize("key", ["response", "episode", "_private", "taken"])
def test_a_second_score_needs_a_key_of_its_own(env, counting_oracle, key):
    taken = pytest.raises(ValueError, match=f"Info key '{key}' is taken")
    with env.also_scored_by("taken", counting_oracle), taken, env.also_scored_by(key, counting_oracle):
        pass


@pytest.mark.parametrize("key", ["response", "response_tokens", "response_truncated"])
def test_a_detail_may_not_hide_the_environments_own_info(tiny_dataset, key):
    class Nosy(Undecided):
        def judge(self, instructions, responses):
            return Verdicts(np.zeros(len(responses)), {key: np.zeros(len(responses))})

    env = InstructionEnv(tiny_dataset, oracle=Nosy())
    env.reset()
    with pytest.raises(ValueError, match=f"detail under '{key}'"):
        env.step("A response.")


# --- Wrong arguments -------------------------------------------------------------------------------------------------


def test_unknown_names_are_answered_with_the_closest(tiny_dataset, constant_oracle):
    with pytest.raises(UnknownNameError, match="Unknown split 'evel'. Did you mean 'eval'"):
        InstructionEnv(tiny_dataset, "evel", constant_oracle)
    with pytest.raises(UnknownNameError, match="Unknown render mode 'asni'. Did you mean 'ansi'"):
        InstructionEnv(tiny_dataset, oracle=constant_oracle, render_mode="asni")
    with pytest.raises(UnknownNameError, match="Unknown on_unscored value 'truncated'. Did you mean 'truncate'"):
        InstructionEnv(tiny_dataset, oracle=constant_oracle, on_unscored="truncated")
    with pytest.raises(UnknownNameError, match="sandbox"):
        InstructionEnv("sandbocks", oracle=constant_oracle)


def test_an_unknown_oracle_is_answered_with_the_closest(tiny_dataset):
    with pytest.raises(UnknownNameError, match="Unknown oracle 'constnat'. Did you mean 'constant'"):
        InstructionEnv(tiny_dataset, oracle="constnat")
    with pytest.raises(UnknownNameError, match="Unknown oracle 'golt'. Did you mean 'gold'"):
        InstructionEnv(tiny_dataset, oracle={"name": "golt"})
    with pytest.raises(UnknownNameError, match="Unknown judge 'sim_evl'. Did you mean 'sim_eval'"):
        InstructionEnv(tiny_dataset, oracle={"judge": "sim_evl", "flip": 0.1})


def test_unknown_options_and_ids(env):
    with pytest.raises(UnknownNameError, match="Unknown reset option 'instruction_ids'. Did you mean 'instruction_id'"):
        env.reset(options={"instruction_ids": [1]})
    for wrong in (7, "107", None, 100.0):
        with pytest.raises(UnknownNameError, match=f"Unknown instruction_id {wrong!r}: .* 12 .* 100 or 111"):
            env.reset(options={"instruction_id": wrong})


def test_an_empty_split_and_ids_given_twice_are_faults_of_the_data(tiny_dataset, constant_oracle):
    tiny_dataset._instructions["val"] = ()
    with pytest.raises(DataError, match="Split 'val' of data set 'tiny' is empty"):
        InstructionEnv(tiny_dataset, "val", constant_oracle)
    tiny_dataset._instructions["val"] = (Instruction("a"), Instruction("b"))
    env = InstructionEnv(tiny_dataset, "val", constant_oracle)
    env.reset()  # drawing needs no ids
    with pytest.raises(DataError, match="instructions 0 and 1 of split 'val' .* both have id -1"):
        env.reset(options={"instruction_id": -1})
