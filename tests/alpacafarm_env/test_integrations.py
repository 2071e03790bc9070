"""Our oracles as other libraries ask them, each by its own code. A library that is not installed is skipped."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from alpacafarm_env import InvalidResponseTypeError, sandbox
from alpacafarm_env import integrations as ours
from alpacafarm_env.envs.registration import IDS
from alpacafarm_env.errors import DataError, UnscoredError
from alpacafarm_env.integrations import compute_score, prompts, reward_function, scorer

pytestmark = pytest.mark.filterwarnings("default")  # of other libraries'
ROWS = sandbox.SANDBOX.instructions("eval")[:4]
RESPONSES = ["A lion is brave, golden and proud.", "- one\n- two\n- three", "", " No. "]
GOLD = sandbox.gold_oracle().score(ROWS, RESPONSES).tolist()


def need(library, distribution=None):
    """The library, whose version is printed."""
    module = pytest.importorskip(library, reason=f"{library} is not installed", exc_type=ImportError)
    print(f"\n{distribution or library} {version(distribution or library)}")
    return module


def test_a_scorers_threads_ask_one_oracle(monkeypatch):
    one, other = scorer(oracle="gold"), scorer(oracle="gold")
    assert one.args == other.args  # the same oracle, so that their calls are merged
    with ThreadPoolExecutor(4) as threads:
        scores = threads.map(lambda row: compute_score("d", row[1], "", {"instruction": row[0]}, oracle="gold"), PAIRS)
        assert list(scores) == GOLD
    with pytest.raises(DataError, match="instruction"):
        compute_score("d", "x", "", {"index": 3}, oracle="gold")
    monkeypatch.setattr("alpacafarm_env.oracles.base.Constant.score", lambda *_: np.array([np.nan]))
    with pytest.raises(UnscoredError, match="'b'"):
        scorer(oracle={"name": "constant", "value": 0.125})(["x"], ["b"])


def test_the_reward_function_for_trl_names_its_column():
    reward = reward_function("gold")
    conversations = [
        [{"role": "assistant", "content": None}, {"role": "assistant", "content": text}] for text in RESPONSES
    ]
    assert reward(completions=conversations, instruction=[str(row) for row in ROWS], prompts=None) == GOLD
    with pytest.raises(DataError, match="instruction"):
        reward(completions=RESPONSES, prompts=RESPONSES)


PAIRS = list(zip(map(str, ROWS), RESPONSES, strict=True))


def test_the_reward_manager_of_verl_calls_the_function():
    need("verl")
    tensordict, hydra = need("tensordict"), need("hydra", "hydra-core")
    import torch
    import verl
    from transformers import AutoTokenizer
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import get_custom_reward_fn

    settings = [line for line in ours.__doc__.splitlines() if "custom_reward_function" in line]
    with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=[line.replace("surrogate", "gold") for line in settings])
    tokenizer = AutoTokenizer.from_pretrained(sandbox.POLICY)
    manager = NaiveRewardManager(config, tokenizer, get_custom_reward_fn(config))

    async def reward(asked, response):
        tokens = torch.tensor([tokenizer.encode(response, add_special_tokens=False)])
        batch = tensordict.TensorDict({"responses": tokens, "attention_mask": torch.ones_like(tokens)}, batch_size=[1])
        row = {"data_source": "d", "reward_model": {"ground_truth": ""}, "extra_info": {"instruction": str(asked)}}
        columns = {name: np.array([value], dtype=object) for name, value in row.items()}
        return (await manager.run_single(DataProto(batch=batch, non_tensor_batch=columns)))["reward_score"]

    async def rewards():
        manager.loop = asyncio.get_running_loop()
        return await asyncio.gather(*(reward(*pair) for pair in PAIRS[:2]))

    assert asyncio.run(rewards()) == GOLD[:2]


def test_skyrl_gym_makes_the_environment():
    skyrl_gym = need("skyrl_gym", "skyrl-gym")
    skyrl_gym.register(id="alpacafarm", entry_point="alpacafarm_env.integrations.skyrl:AlpacaFarmEnv")
    for (asked, response), gold in zip(PAIRS, GOLD, strict=True):
        extras = {"extra_info": {"instruction": asked}}
        env = skyrl_gym.make("alpacafarm", env_config={"oracle": "gold"}, extras=extras)
        prompt = [{"role": "user", "content": asked}]
        assert env.init(prompt)[0] == prompt
        assert env.step(response) == {"observations": [], "reward": gold, "done": True, "metadata": {}}


def test_verifiers_scores_the_tasks_traces():
    vf = need("verifiers.v1", "verifiers")
    from verifiers.v1.graph import MessageNode

    from alpacafarm_env.integrations.verifiers import AlpacaFarmConfig, AlpacaFarmTaskset, OracleConfig

    taskset = AlpacaFarmTaskset(AlpacaFarmConfig(split="eval", task=OracleConfig(oracle="gold")))
    tasks = list(taskset.take(len(ROWS)))
    assert [task.data.prompt for task in tasks] == [str(row) for row in ROWS]
    assert [task.data.id for task in tasks] == [str(row.id) for row in ROWS]

    def trace(task, response):
        prompt = MessageNode(message=vf.UserMessage(content=task.data.prompt), parent=None)
        answer = MessageNode(message=vf.AssistantMessage(content=response), parent=0, sampled=True)
        about = vf.TraceTask(type=type(task).__name__, data=task.data)
        return vf.Trace(task=about, agent=vf.AgentInfo(config=vf.AgentConfig()), nodes=[prompt, answer])

    async def score(task, response):
        scored = trace(task, response)
        await task.score(scored)
        return scored.rewards["alpacafarm"].value

    async def scores():
        return await asyncio.gather(*map(score, tasks, RESPONSES))

    assert asyncio.run(scores()) == GOLD


def test_trl_s_prompts_have_what_the_reward_reads():
    need("datasets")
    rows = prompts()
    assert rows[0]["instruction"] == rows[0]["prompt"][0]["content"]


@pytest.fixture
def envs():
    return need("torchrl.envs", "torchrl")


@pytest.mark.parametrize("id", IDS)
def test_torchrls_check_of_an_environment_passes(envs, id):
    envs.check_env_specs(envs.GymEnv(id))


def test_an_episode_of_texts_is_that_of_the_environment(envs):
    env = envs.GymWrapper(gym.make("AlpacaFarm-Gold-v0"))
    asked = env.reset(seed=3)
    asked.set_non_tensor("action", "A lion is brave.")
    expected = sandbox.gold_oracle().score([asked["observation"]], ["A lion is brave."])
    stepped = env.step(asked)["next"]
    assert stepped["reward"].tolist() == pytest.approx(expected.tolist())
    assert stepped["terminated"].all()


def test_episodes_of_tokens_are_batched_natively(envs):
    one = {"name": "constant", "value": 1.0}
    env = envs.GymWrapper(gym.make_vec("AlpacaFarm-Token-v0", num_envs=3, oracle=one, autoreset_mode="Disabled"))
    envs.check_env_specs(env)
    steps = env.rollout(130, break_when_any_done=False)["next"]  # of at most 64 tokens an episode
    assert (steps["done"].sum(1) >= 2).all()
    assert (steps["reward"] == steps["done"]).all()


def test_a_batch_of_texts_is_refused(envs):
    """TorchRL hands on one text for all slots."""
    env = envs.GymWrapper(gym.make_vec("AlpacaFarm-Gold-v0", num_envs=3, autoreset_mode="Disabled"))
    with pytest.raises(InvalidResponseTypeError, match="3 responses"):
        env.rollout(2)
