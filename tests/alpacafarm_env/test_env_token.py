"""The token environments: what an episode is, what Stable-Baselines3 makes of it, and that many are as one."""

import json

import gymnasium as gym
import numpy as np
import pytest
from equality import assert_same
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from stable_baselines3.common.env_util import make_vec_env
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from alpacafarm_env import DataError, UnscoredError, sandbox
from alpacafarm_env.envs.token import TokenEnv, TokenVectorEnv

WORDS = ["<pad>", "</s>", "<unk>", "say", "hello", "goodbye", "twice", "in", "French", ":"]
EOS, HELLO = WORDS.index("</s>"), WORDS.index("hello")
ROWS = [
    {"instruction": "say hello", "input": "", "output": "hello"},
    {"instruction": "say goodbye", "input": "in French", "output": "goodbye"},
    {"instruction": "say hello twice", "input": "", "output": "hello hello"},
]


class Brevity:
    """Minus the number of words, or no verdict; remembers what it was asked."""

    name = "brevity"

    def __init__(self, silent=False):
        self.silent, self.asked = silent, []

    def score(self, instructions, responses):
        self.asked += zip(instructions, responses, strict=True)
        return np.array([np.nan if self.silent else -len(response.split()) for response in responses])

    def __deepcopy__(self, memo):
        return self


def save_tokenizer(folder, **special_tokens):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained(folder)
    template = {"prompt_inputs": "{instruction} {input} :", "prompt_noinputs": "{instruction} :"}
    (folder / "prompt_template.json").write_text(json.dumps(template), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def keywords(tmp_path_factory):
    """Of the token environments."""
    data, policy = map(tmp_path_factory.mktemp, ("data", "policy"))
    (data / "unlabeled.json").write_text(json.dumps(ROWS), encoding="utf-8")
    save_tokenizer(policy, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    return {"dataset": str(data), "tokenizer": str(policy), "max_prompt_tokens": 8, "max_response_tokens": 4}


@pytest.fixture
def make(keywords):
    return lambda oracle=None, **changes: TokenEnv(**{**keywords, "oracle": oracle or Brevity(), **changes})


def ask(env, index=0):
    return env.reset(options={"instruction_id": env.instructions[index].id})


@pytest.mark.filterwarnings("error")
def test_both_checks_pass_without_a_warning(keywords):
    env = gym.make("AlpacaFarm-Token-v0", **keywords, oracle="constant", render_mode="rgb_array")
    gymnasium_check_env(env.unwrapped, skip_render_check=True)
    sb3_check_env(env.unwrapped, skip_render_check=False)
    many = make_vec_env("AlpacaFarm-Token-v0", 2, seed=0, env_kwargs={"oracle": "constant"})
    assert many.reset()["input_ids"].shape == (2, 256)


def test_observations_are_prompt_response_and_padding(make):
    env = make()
    observation, asked = ask(env, 1)
    prompt = [WORDS.index(word) for word in ("say", "goodbye", "in", "French", ":")]
    assert observation["input_ids"].tolist() == [*prompt, *[0] * 7]
    assert observation["attention_mask"].tolist() == [1] * 5 + [0] * 7
    assert asked == {"instruction_id": env.instructions[1].id, "split": "unlabeled"}
    observation, reward, terminated, truncated, info = env.step(HELLO)
    assert observation["input_ids"].tolist() == [*prompt, HELLO, *[0] * 6]
    assert observation["attention_mask"].sum() == 6
    assert (reward, terminated, truncated, info) == (0.0, False, False, asked)
    assert env.observation_space.contains(observation)
    assert (observation["input_ids"].dtype, observation["attention_mask"].dtype) == (np.int64, np.int8)


def test_only_ended_responses_are_scored(make):
    env = make(oracle := Brevity())
    with pytest.raises(ResetNeeded):
        env.step(EOS)
    ask(env)
    env.step(HELLO)
    env.step(np.int64(HELLO))
    assert oracle.asked == []
    observation, reward, terminated, truncated, info = env.step(np.array(EOS))
    assert oracle.asked == [("say hello", "hello hello")]  # once, without the EOS
    assert (reward, terminated, truncated) == (-2.0, True, False)
    assert (info["response"], info["response_length"], info["response_tokens"]) == ("hello hello", 11, 3)
    assert (info["response_truncated"], info["scored"]) == (False, True)
    assert info["reward_components"] == {"brevity": -2.0}
    assert observation["attention_mask"].sum() == 3 + 3
    with pytest.raises(ResetNeeded):
        env.step(EOS)


@pytest.mark.parametrize(
    ("tokens", "reward", "response", "cut"),
    [
        ([HELLO] * 4, -4.0, "hello hello hello hello", True),
        ([HELLO, HELLO, HELLO, EOS], -3.0, "hello hello hello", False),  # the last one allowed
        ([EOS], 0.0, "", False),
    ],
)
def test_the_length_limit_terminates(make, tokens, reward, response, cut):
    env = make()
    ask(env)
    steps = [env.step(token) for token in tokens]
    assert [step[1:4] for step in steps] == [(0.0, False, False)] * (len(tokens) - 1) + [(reward, True, False)]
    info = steps[-1][4]
    found = (info["response"], info["response_tokens"], info["response_truncated"])
    assert found == (response, len(tokens), cut)


def test_no_verdict_leaves_open_or_truncates(make):
    env = make(Brevity(silent=True))
    ask(env)
    env.step(HELLO)
    with pytest.raises(UnscoredError):
        env.step(EOS)
    with env.scored_by(Brevity()):
        _, reward, *_, info = env.step(EOS)
    assert (reward, info["response_tokens"]) == (-1.0, 2)  # the EOS that could not be scored is not counted twice
    env = make(Brevity(silent=True), on_unscored="truncate")
    ask(env)
    _, reward, terminated, truncated, info = env.step(EOS)
    assert np.isnan(reward)
    assert (terminated, truncated, info["scored"]) == (False, True, False)


def test_invalid_tokens_are_refused_and_cost_nothing(make):
    env = make()
    ask(env)
    for action in (-1, len(WORDS), 1.0, "hello", None):
        with pytest.raises(InvalidAction, match=r"0 to 9"):
            env.step(action)
    assert env.step(EOS)[4]["response_tokens"] == 1


def test_long_prompts_are_refused_by_name(make):
    env = make(max_prompt_tokens=3)
    ask(env)  # three tokens
    with pytest.raises(ValueError, match=rf"=3 .* {env.instructions[1].id} .* 5"):
        ask(env, 1)
    with pytest.raises(ResetNeeded):
        env.step(EOS)


def test_sandbox_defaults_never_cut_a_text():
    env = gym.make("AlpacaFarm-Token-v0", disable_env_checker=True).unwrapped
    positions = json.loads((sandbox.REWARD_MODEL / "config.json").read_text())["max_position_embeddings"]
    assert env.max_prompt_tokens + env.max_response_tokens == positions
    rng = np.random.default_rng(0)
    for seed in range(3):
        observation, info = env.reset(seed=seed)
        assert observation["input_ids"].shape == (positions,)
        instruction = env.instructions[env.find_instruction(info["instruction_id"])]
        prompt = observation["input_ids"][observation["attention_mask"] == 1]
        assert env.tokenizer.decode(prompt) == env.template.render(instruction)
        ended = False
        while not ended:
            _, _, ended, _, info = env.step(int(rng.integers(len(env.tokenizer))))
        assert info["reward_input_truncated"] is False


def test_model_cuts_and_length_limits_differ():
    env = TokenEnv(oracle={"name": "surrogate", "max_length": 16}, max_prompt_tokens=192, max_response_tokens=2)
    for last, truncated in ((env.eos_token_id, False), (5, True)):
        env.reset(seed=0)
        env.step(5)
        info = env.step(last)[4]
        assert (info["response_truncated"], info["reward_input_truncated"]) == (truncated, True)


@pytest.mark.parametrize(
    ("positions", "given", "limits"),
    [
        (None, {}, (192, 300)),
        (256, {}, (192, 64)),
        (40, {}, (30, 10)),
        (40, {"max_prompt_tokens": 8}, (8, 32)),
        (40, {"max_response_tokens": 16}, (24, 16)),
    ],
)
def test_the_limits_fit_the_model(keywords, tmp_path, positions, given, limits):
    said_by = [{}, {"model_max_length": positions}] if positions else [{}]
    for number, length in enumerate(said_by):
        (folder := tmp_path / str(number)).mkdir()
        save_tokenizer(folder, eos_token="</s>", **length)
        if positions and not length:
            config = {"model_type": "llama", "max_position_embeddings": positions}
            (folder / "config.json").write_text(json.dumps(config))
        env = TokenEnv(keywords["dataset"], oracle=Brevity(), tokenizer=folder, **given)
        assert (env.max_prompt_tokens, env.max_response_tokens) == limits
        observation, _ = ask(env, 1)
        assert observation["input_ids"].shape == (sum(limits),)
        # A tokenizer without a padding token pads with EOS.
        assert (observation["input_ids"][observation["attention_mask"] == 0] == EOS).all()


def test_limits_beyond_the_model_warn(make, keywords, tmp_path):
    folder = save_tokenizer(tmp_path, eos_token="</s>", model_max_length=10)
    with pytest.warns(UserWarning, match="max_response_tokens"):
        env = make(tokenizer=folder)
    assert (env.max_prompt_tokens, env.max_response_tokens) == (8, 4)
    for wrong in ({"max_prompt_tokens": 10}, {"max_response_tokens": 10}, {"max_prompt_tokens": -1}):
        with pytest.raises(ValueError, match="max_prompt_tokens"):
            TokenEnv(keywords["dataset"], oracle=Brevity(), tokenizer=folder, **wrong)
    with pytest.raises(ValueError, match="at least 1"):
        make(max_response_tokens=0)


def test_a_tokenizer_that_cannot_serve_is_refused(make, tmp_path):
    (tmp_path / "empty").mkdir()
    save_tokenizer(tmp_path / "endless", pad_token="<pad>")
    for folder, fact in (("absent", "no folder"), ("empty", "tokenizer"), ("endless", "eos_token")):
        with pytest.raises(DataError, match=f"{folder}.*{fact}|{fact}.*{folder}"):
            make(tokenizer=tmp_path / folder)


NUM_ENVS = 5
each_mode = pytest.mark.parametrize("mode", list(AutoresetMode))


class Picky(Brevity):  # no verdict on "hello" alone
    def score(self, instructions, responses):
        silent = np.array([response == "hello" for response in responses])
        return np.where(silent, np.nan, super().score(instructions, responses))


def pair(keywords, mode, **changes):
    changes = {**keywords, "on_unscored": "truncate", **changes}
    ours = TokenVectorEnv(NUM_ENVS, oracle=Picky(), autoreset_mode=mode, **changes)
    theirs = SyncVectorEnv([lambda: TokenEnv(oracle=Picky(), **changes)] * NUM_ENVS, autoreset_mode=mode)
    return ours, theirs


def assert_same_step(ours, theirs):
    ours, theirs = ([*step[:-1], dict(step[-1])] for step in (ours, theirs))
    final, expected = (infos[-1].pop("final_obs", np.array([])).tolist() for infos in (ours, theirs))
    assert_same(tuple(final), tuple(expected), "final_obs")
    assert_same(tuple(ours), tuple(theirs))


@each_mode
def test_equals_sync_episode_by_episode(keywords, mode):
    ours, theirs = pair(keywords, mode)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    rng = np.random.default_rng(0)
    assert_same_step(ours.reset(seed=5), theirs.reset(seed=5))
    ends = truncations = 0
    for step in range(60):
        actions = np.where(rng.random(NUM_ENVS) < 0.3, EOS, rng.integers(len(WORDS), size=NUM_ENVS))
        found, expected = ours.step(actions), theirs.step(actions)
        assert_same_step(found, expected)
        ended = found[2] | found[3]
        ends, truncations = ends + ended.sum(), truncations + found[3].sum()
        if step % 20 == 7:
            ended[step % NUM_ENVS] = True  # an open episode is given up
        if ended.any() and (mode is AutoresetMode.DISABLED or step % 20 == 7):
            options = {"reset_mask": ended}
            assert_same_step(ours.reset(seed=step, options=dict(options)), theirs.reset(seed=step, options=options))
    assert ends > 50
    assert truncations > 0


@each_mode
def test_one_call_scores_what_ends_together(keywords, mode):
    env = TokenVectorEnv(64, oracle=(oracle := Brevity()), autoreset_mode=mode, **keywords)
    calls = []
    score, oracle.score = oracle.score, lambda i, r: calls.append(len(r)) or score(i, r)
    env.reset(seed=0)
    env.step(np.full(64, HELLO))
    assert calls == []
    env.step(np.where(np.arange(64) % 2, EOS, HELLO))
    assert calls == [32]


def test_rendering_equals_sync(keywords):
    ours, theirs = pair(keywords, AutoresetMode.SAME_STEP, render_mode="ansi")
    for env in (ours, theirs):
        env.reset(seed=0)
    for token in (HELLO, HELLO, EOS, HELLO):
        for env in (ours, theirs):
            env.step(np.array([token, HELLO, HELLO, EOS, HELLO]))
        assert ours.render() == theirs.render()


def test_what_it_is_given_stays_as_it_was(keywords):
    env = TokenVectorEnv(2, oracle=Brevity(), **keywords)
    observed = [env.reset(seed=0)[0], env.step([HELLO, EOS])[0]]
    kept = [{key: values.copy() for key, values in each.items()} for each in observed]
    env.step([HELLO, HELLO])
    observed[1]["input_ids"][:] = 0
    assert_same(observed[0], kept[0])
    assert (env.step([EOS, EOS])[0]["input_ids"] != 0).any()


def test_a_step_that_raises_changes_nothing(keywords):
    env, other = (TokenVectorEnv(2, oracle=Picky(), autoreset_mode="Disabled", **keywords) for _ in range(2))
    for each in (env, other):
        each.reset(seed=0)
        each.step([HELLO, HELLO])
    for wrong in ([HELLO], HELLO, "no", [HELLO, len(WORDS)], [HELLO, -1], [0.5, HELLO], None):
        with pytest.raises(InvalidAction):
            env.step(wrong)
    with pytest.raises(UnscoredError):
        env.step([EOS, HELLO])
    assert_same(env.step([HELLO, HELLO]), other.step([HELLO, HELLO]))
    env.step([EOS, EOS])
    with pytest.raises(ResetNeeded):
        env.step([EOS, EOS])


def test_long_prompts_and_groups_are_refused(keywords):
    env = TokenVectorEnv(2, oracle=Brevity(), **{**keywords, "max_prompt_tokens": 3})
    with pytest.raises(ResetNeeded):
        env.step([HELLO, HELLO])
    ids = [instruction.id for instruction in env.instructions]
    with pytest.raises(ValueError, match="num_generations"):
        env.reset(options={"num_generations": 2})
    env.reset(options={"instruction_ids": [ids[0], ids[0]]})
    with pytest.raises(ValueError, match=rf"=3 .* {ids[1]} .* 5"):
        env.reset(options={"instruction_ids": [ids[0], ids[1]]})
    with pytest.raises(ResetNeeded):
        env.step([HELLO, HELLO])
