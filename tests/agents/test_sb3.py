"""Stable-Baselines3 with a language model as its policy: the same numbers as the model's own, KL, saving, logs."""

import csv

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.error import CustomSpaceError
from gymnasium.vector import AutoresetMode
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_worlds import BUILDERS, ENDS, INSTRUCTIONS, LORA, build_ending, build_tokenizer

from alpacafarm_env import wrappers
from alpacafarm_env.agents import sb3
from alpacafarm_env.agents.adapters import turn_off_dropout
from alpacafarm_env.agents.language_model import LanguageModel
from alpacafarm_env.envs.token import TokenEnv, TokenVectorEnv

LIMITS = {"max_prompt_tokens": 80, "max_response_tokens": 6}


class Letters:
    """How many Latin letters a response has."""

    name = "letters"

    def score(self, instructions, responses):
        return np.array([float(sum("A" <= letter <= "z" for letter in response)) for response in responses])


class Length:
    """How many characters it has."""

    name = "length"

    def score(self, instructions, responses):
        return np.array([float(len(response)) for response in responses])


@pytest.fixture
def make(policy_folder, tiny_dataset):
    """A function that makes SB3's environments, with `length_reward` in the infos and in the monitor's file."""
    made = []

    def make(num_envs=8, path=None, **changes):
        named = {"oracle": Letters(), "tokenizer": str(policy_folder), **LIMITS, **changes}
        env = TokenVectorEnv(num_envs, tiny_dataset, **named)
        env = wrappers.vector.AddScore(env, key="length_reward", oracle=Length())
        made.append(VecMonitor(sb3.TokenVecEnv(env), path and str(path), info_keywords=("length_reward",)))
        return made[-1]

    yield make
    for env in made:
        env.close()


def keywords(folder, **changes):
    """For 8 environments."""
    changes = {"n_steps": 16, "batch_size": 64, "n_epochs": 2, "learning_rate": 3e-3, "seed": 0, **changes}
    return sb3.keywords(folder, device="cpu", **changes)


@pytest.fixture
def settings(policy_folder):
    return keywords(policy_folder)


def collect(agent):
    """One rollout into the agent's buffer."""
    agent._setup_learn(1)
    agent.collect_rollouts(agent.env, agent._init_callback(None), agent.rollout_buffer, agent.n_steps)
    return agent.rollout_buffer


def test_the_policy_says_what_the_model_says(make, settings, policy_folder):
    policy, model = PPO(env=make(), **settings).policy, LanguageModel.from_pretrained(policy_folder)
    rollouts = model.as_rollouts(INSTRUCTIONS[:1], ["A robin"])
    expected = model.logprobs(rollouts).detach()
    context, response = rollouts.prompt_tokens.tolist(), rollouts.tokens.tolist()
    ids, mask = torch.zeros(2, len(response), 86, dtype=torch.int64)
    for step in range(len(response)):
        ids[step, : len(context) + step] = torch.tensor([*context, *response[:step]])
        mask[step, : len(context) + step] = 1
    observations, actions = {"input_ids": ids, "attention_mask": mask}, torch.tensor(response)
    values, logprobs, entropy = policy.evaluate_actions(observations, actions)
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)
    assert (values == 0).all()
    assert entropy.shape == (len(response),)
    with torch.no_grad():
        torch.testing.assert_close(policy.evaluate_actions(observations, actions)[1], expected, rtol=1e-4, atol=1e-5)
    trained = {id(parameter) for group in policy.optimizer.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in policy.parameters()}
    assert {id(parameter) for parameter in policy.language_model.model.parameters()} < trained


def test_ppo_learns_and_what_it_saved_acts_alike(make, settings, policy_folder, tmp_path):
    """Its reward grows within a few steps; monitor, TensorBoard and the best model are written."""
    best = EvalCallback(
        make(4), n_eval_episodes=8, eval_freq=64, best_model_save_path=str(tmp_path / "best"), verbose=0
    )
    agent = PPO(env=make(path=tmp_path / "run"), tensorboard_log=str(tmp_path / "board"), **settings)
    before, _ = evaluate_policy(agent, make(16), 64, deterministic=False)
    agent.learn(16 * 8 * 12, [best, sb3.ScoresCallback()])
    after, _ = evaluate_policy(agent, make(16), 64, deterministic=False)
    assert after > before + 0.5

    lines = (tmp_path / "run.monitor.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(lines[1:]))  # the first is a comment
    assert len(rows) > 100
    assert all(float(row["length_reward"]) >= float(row["r"]) for row in rows)
    board = EventAccumulator(str(tmp_path / "board" / "PPO_1")).Reload()
    divergence = [event.value for event in board.Scalars("rollout/kl")]
    assert divergence[0] == pytest.approx(0, abs=1e-4)
    assert divergence[-1] > 0.1
    assert {"rollout/length_reward", "rollout/ep_rew_mean", "eval/mean_reward"} <= set(board.Tags()["scalars"])

    observed = make().reset()
    agent.save(tmp_path / "agent.zip")
    agent.policy.save(str(tmp_path / "policy.pth"))
    agent.policy.language_model.save(tmp_path / "model")
    expected, _ = agent.predict(observed, deterministic=True)
    fresh = PPO(env=make(), **settings)
    again = PPO.load(tmp_path / "agent.zip", env=make(), device="cpu")
    alone = sb3.LanguageModelPolicy.load(str(tmp_path / "policy.pth"), device="cpu")
    model = PPO(env=make(), **keywords(tmp_path / "model"))
    for other in (again, alone, model):
        np.testing.assert_array_equal(other.predict(observed, deterministic=True)[0], expected)
    assert (fresh.predict(observed, deterministic=True)[0] != expected).any()
    again.learn(16 * 8)
    PPO.load(tmp_path / "best" / "best_model.zip", device="cpu").predict(observed)


def test_equal_seeds_learn_equal_weights_and_a2c_learns_too(make, settings):
    weights = [PPO(env=make(), **settings).learn(128).policy.action_net.weight for _ in range(2)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    for name in ("batch_size", "n_epochs"):
        settings.pop(name)
    A2C(env=make(), **settings).learn(128)


def test_of_an_adapter_only_the_adapter_and_the_value_train(make, policy_folder, tmp_path):
    LanguageModel.from_pretrained(policy_folder, lora=LORA).save(tmp_path / "adapter")
    agent = PPO(env=make(), **keywords(tmp_path / "adapter", kl_coef=0.0))
    before = {name: value.clone() for name, value in agent.policy.state_dict().items()}
    agent.learn(2 * 16 * 8)
    moved = {name for name, value in agent.policy.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.partition(".lora_")[1] or name.partition(".")[0] for name in moved} == {".lora_", "value_net"}
    agent.save(tmp_path / "agent.zip")
    again, observed = PPO.load(tmp_path / "agent.zip", device="cpu"), make().reset()
    expected, _ = agent.predict(observed, deterministic=True)
    np.testing.assert_array_equal(again.predict(observed, deterministic=True)[0], expected)


def test_the_penalty_is_the_ratio_to_the_reference(make, policy_folder):
    """Of a policy that has moved; the reference is read through another path, whole responses at once."""
    agent = PPO(env=make(), **keywords(policy_folder, kl_coef=0.5))
    with torch.no_grad():
        agent.policy.action_net.weight.mul_(1.1)
    buffer, model = collect(agent), LanguageModel.from_pretrained(policy_folder)
    ids, lengths = (buffer.observations["input_ids"], buffer.observations["attention_mask"].sum(-1))
    for slot in range(8):
        tokens = torch.tensor(ids[-1, slot, : lengths[-1, slot]])[None]
        start = max(step for step in range(16) if buffer.episode_starts[step, slot] or step == 0)
        logits = model.model(input_ids=tokens).logits[0, lengths[start, slot] - 1 :].log_softmax(-1).detach()
        reference = logits.gather(1, torch.tensor(buffer.actions[start:, slot])).flatten().numpy()
        np.testing.assert_allclose(buffer.log_probs[start:, slot] - reference, buffer.kl[start:, slot], atol=1e-4)
    assert np.abs(buffer.kl).max() > 0.1
    unended = np.append(buffer.episode_starts[1:] == 0, agent._last_episode_starts[None] == 0, axis=0)
    np.testing.assert_allclose(buffer.rewards[unended], -0.5 * buffer.kl[unended], atol=1e-6)
    ended = int(buffer.episode_starts[1:].sum() + agent._last_episode_starts.sum())
    assert buffer.kl_per_response == pytest.approx(buffer.kl.sum() / ended, rel=1e-4)


def test_minibatches_are_whole_slots_each_once(make, settings):
    agent = PPO(env=make(6), **settings | {"batch_size": 48})
    buffer = collect(agent)
    expected = buffer.swap_and_flatten(buffer.log_probs).reshape(6, 16)
    found = [minibatch.old_log_prob.numpy().reshape(-1, 16) for minibatch in buffer.get(64)]
    assert [len(part) for part in found] == [4, 2]
    np.testing.assert_array_equal(np.sort(np.concatenate(found), axis=0), np.sort(expected, axis=0))
    assert {row.tobytes() for part in found for row in part} == {row.tobytes() for row in expected}
    assert [len(minibatch.returns) for minibatch in buffer.get()] == [96]
    orders = {next(buffer.get()).old_log_prob.numpy().tobytes() for _ in range(5)}
    assert len(orders) > 1
    with pytest.raises(ValueError, match="n_steps=16"):
        next(buffer.get(15))


def test_environments_equal_those_of_stable_baselines3(policy_folder, tiny_dataset):
    settings = {"dataset": tiny_dataset, "oracle": Letters(), "tokenizer": str(policy_folder), **LIMITS}
    ours = sb3.TokenVecEnv(TokenVectorEnv(3, **settings))
    theirs = DummyVecEnv([lambda: TokenEnv(**settings)] * 3)
    assert (ours.observation_space, ours.action_space) == (theirs.observation_space, theirs.action_space)
    for env in (ours, theirs):
        env.seed(3)
    np.testing.assert_equal(ours.reset(), theirs.reset())
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert ours.reset_infos == theirs.reset_infos
        actions = np.where(rng.random(3) < 0.3, 1, rng.integers(3, 259, size=3))
        found, expected = ours.step(actions), theirs.step(actions)
        np.testing.assert_equal(found, expected)
        assert found[1].dtype == expected[1].dtype
    assert len(ours.get_attr("instructions")) == 3
    assert ours.env_is_wrapped(VecMonitor) == [False] * 3


def test_texts_are_refused_with_the_id_that_can_be_trained():
    from stable_baselines3.common.env_util import make_vec_env

    for make_algorithm in (make_vec_env, lambda name: PPO("MlpPolicy", gym.make(name, oracle="constant"))):
        with pytest.raises(CustomSpaceError, match="AlpacaFarm-Token-v0"):
            make_algorithm("AlpacaFarm-PPO-v0")


def test_what_cannot_work_is_refused(make, settings, policy_folder):
    with pytest.raises(TypeError, match="Token-v0"):
        sb3.TokenVecEnv(gym.make_vec("AlpacaFarm-PPO-v0", num_envs=2, oracle="constant"))
    for changes in ({"on_unscored": "truncate"}, {"autoreset_mode": AutoresetMode.NEXT_STEP}):
        with pytest.raises(ValueError, match="SameStep"):
            make(**changes)
    sandbox = gym.make_vec("AlpacaFarm-Token-v0", num_envs=8, oracle="constant")
    with pytest.raises(ValueError, match="tokenizer=folder"):
        PPO(env=sb3.TokenVecEnv(sandbox), **settings)
    with pytest.raises(ValueError, match="positions"), pytest.warns(UserWarning, match="positions|read"):
        PPO(env=make(max_prompt_tokens=300), **settings)
    with pytest.raises(ValueError, match="kl_coef"):
        PPO(env=make(), **keywords(policy_folder, kl_coef=-1))
    env = make()
    env.set_options({"instruction_id": 100})
    with pytest.raises(ValueError, match="instruction_id"):
        env.reset()


@pytest.mark.parametrize("architecture", ENDS)
def test_models_that_change_their_logits_are_told_apart(architecture, tokenizer):
    plain = sb3.gives_plain_logits(build_ending(architecture, tokenizer).model)
    assert plain == (architecture not in ("Gemma2", "Cohere", "Granite"))


LENGTH = 24
VOCABULARY = len(build_tokenizer())


@pytest.fixture(params=sorted(BUILDERS))
def trunk(request):
    return turn_off_dropout(BUILDERS[request.param](VOCABULARY)).base_model


def table(contexts):
    """Right padded with 2, a token that contexts have too, [B, LENGTH]; and lengths."""
    rows = [[*context, *[2] * (LENGTH - len(context))] for context in contexts]
    return torch.tensor(rows), torch.tensor([len(context) for context in contexts])


def one_by_one(trunk, contexts):
    return torch.cat([trunk(input_ids=torch.tensor([context])).last_hidden_state[:, -1] for context in contexts])


def test_states_and_gradients_are_those_of_one_pass_each(trunk):
    a, b = [5, 6, 7, 8, 9, 10, 2, 2], [5, 6, 7, 3]
    contexts = [a[:3], b, a, a[:6], a[:7], a[:1], [9], a]
    expected = one_by_one(trunk, contexts)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad((expected * weights).sum(), trunk.parameters())
    counts = []
    trunk.register_forward_pre_hook(lambda _, args, named: counts.append(named["input_ids"].numel()), with_kwargs=True)
    states = sb3.last_states(trunk, *table(contexts))
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
    assert counts == [3 * len(a)]  # a, b and [9], padded to the longest
    for mine, theirs in zip(torch.autograd.grad((states * weights).sum(), trunk.parameters()), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
