"""The token environment: both check_envs, what an episode is, and that Stable-Baselines3 trains in it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import alpacafarm_env
from alpacafarm_env import DataError, UnscoredError, sandbox
from alpacafarm_env.envs.token import TokenEnv

WORDS = ["<pad>", "</s>", "<unk>", "say", "hello", "goodbye", "twice", "in", "French", ":"]
EOS, HELLO = WORDS.index("</s>"), WORDS.index("hello")
ROWS = [
    {"instruction": "say hello", "input": "", "output": "hello"},
    {"instruction": "say goodbye", "input": "in French", "output": "goodbye"},
    {"instruction": "say hello twice", "input": "", "output": "hello hello"},
]


@dataclass
class Brevity:
    """Minus the number of words; remembers what it was asked."""

    name: str = "brevity"
    asked: list[tuple[str, str]] = field(default_factory=list)

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        self.asked += zip(instructions, responses, strict=True)
        return np.array([-len(response.split()) for response in responses], dtype=np.float64)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Brevity":
        return self


class Silent(Brevity):
    """No verdict on anything."""

    def score(self, instructions: Sequence[str], responses: Sequence[str]) -> NDArray[np.float64]:
        return np.full(len(responses), np.nan)


def save_tokenizer(folder: Path, **special_tokens: Any) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained(folder)
    template = {"prompt_inputs": "{instruction} {input} :", "prompt_noinputs": "{instruction} :"}
    (folder / "prompt_template.json").write_text(json.dumps(template), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def keywords(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = tmp_path_factory.mktemp("data")
    (data / "unlabeled.json").write_text(json.dumps(ROWS), encoding="utf-8")
    folder = save_tokenizer(tmp_path_factory.mktemp("policy"), eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    return {"dataset": str(data), "tokenizer": str(folder), "max_prompt_tokens": 8, "max_response_tokens": 4}


def make(keywords: dict[str, Any], oracle: Any = None, **changes: Any) -> TokenEnv:
    return TokenEnv(**{**keywords, "oracle": oracle or Brevity(), **changes})


def ask(env: TokenEnv, index: int) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    return env.reset(options={"instruction_id": env.instructions[index].id})


@pytest.mark.filterwarnings("error")
def test_passes_both_checks_without_a_warning(keywords: dict[str, Any]) -> None:
    env = gym.make("AlpacaFarm-Token-v0", **keywords, oracle="constant")
    gymnasium_check_env(env.unwrapped)
    sb3_check_env(env.unwrapped)


def test_the_spec_is_json(keywords: dict[str, Any]) -> None:
    env = gym.make("AlpacaFarm-Token-v0", **keywords, oracle="constant")
    assert env.spec is not None
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    first, second = (e.reset(seed=3)[0] for e in (env, again))
    np.testing.assert_array_equal(first["input_ids"], second["input_ids"])


def test_an_observation_is_the_prompt_then_the_response_then_padding(keywords: dict[str, Any]) -> None:
    env = make(keywords)
    observation, info = ask(env, 1)
    prompt = [WORDS.index(word) for word in ("say", "goodbye", "in", "French", ":")]
    assert observation["input_ids"].tolist() == [*prompt, *[0] * 7]
    assert observation["attention_mask"].tolist() == [1] * 5 + [0] * 7
    assert info == {"instruction_id": env.instructions[1].id, "split": "unlabeled"}
    observation, reward, terminated, truncated, info = env.step(HELLO)
    assert observation["input_ids"].tolist() == [*prompt, HELLO, *[0] * 6]
    assert observation["attention_mask"].sum() == 6
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"instruction_id": env.instructions[1].id, "split": "unlabeled"}
    assert env.observation_space.contains(observation)
    assert observation["input_ids"].dtype == np.int64
    assert observation["attention_mask"].dtype == np.int8


def test_eos_ends_the_response_and_only_then_is_it_scored(keywords: dict[str, Any]) -> None:
    env, oracle = make(keywords, brevity := Brevity()), brevity
    ask(env, 0)
    env.step(HELLO)
    env.step(np.int64(HELLO))
    assert oracle.asked == []
    observation, reward, terminated, truncated, info = env.step(np.array(EOS))
    assert oracle.asked == [("say hello", "hello hello")]  # once, without the EOS
    assert (reward, terminated, truncated) == (-2.0, True, False)
    assert (info["response"], info["response_length"], info["response_tokens"]) == ("hello hello", 11, 3)
    assert info["response_truncated"] is False
    assert info["scored"] is True
    assert info["reward_components"] == {"brevity": -2.0}
    assert observation["attention_mask"].sum() == 3 + 3
    with pytest.raises(ResetNeeded):
        env.step(EOS)


def test_the_length_limit_terminates(keywords: dict[str, Any]) -> None:
    env = make(keywords)
    ask(env, 0)
    steps = [env.step(HELLO) for _ in range(4)]
    assert [terminated for _, _, terminated, _, _ in steps] == [False, False, False, True]
    assert not any(truncated for _, _, _, truncated, _ in steps)
    assert [reward for _, reward, _, _, _ in steps] == [0.0, 0.0, 0.0, -4.0]
    info = steps[-1][4]
    assert info["response_truncated"] is True
    assert info["response"] == "hello hello hello hello"


def test_eos_as_the_last_allowed_token_is_not_cut_off(keywords: dict[str, Any]) -> None:
    env = make(keywords)
    ask(env, 0)
    for _ in range(3):
        env.step(HELLO)
    assert env.step(EOS)[4]["response_truncated"] is False


def test_an_empty_response_is_legal(keywords: dict[str, Any]) -> None:
    env = make(keywords)
    ask(env, 0)
    _, reward, terminated, _, info = env.step(EOS)
    assert (reward, terminated, info["response"], info["response_tokens"]) == (0.0, True, "", 1)


def test_wrappers_decide_and_add_scores_here_too(keywords: dict[str, Any]) -> None:
    own, deciding, observer = Brevity("own"), Brevity("deciding"), Brevity("observer")
    env = make(keywords, own)
    ask(env, 0)
    with env.scored_by(deciding), env.also_scored_by("gold_reward", observer):
        env.step(HELLO)
        _, reward, _, _, info = env.step(EOS)
    assert (reward, info["oracle"], info["gold_reward"]) == (-1.0, "deciding", -1.0)
    assert [len(oracle.asked) for oracle in (own, deciding, observer)] == [0, 1, 1]


def test_no_verdict_leaves_the_episode_open_or_truncates_it(keywords: dict[str, Any]) -> None:
    env = make(keywords, Silent())
    ask(env, 0)
    env.step(HELLO)
    with pytest.raises(UnscoredError):
        env.step(EOS)
    with env.scored_by(Brevity()):
        assert env.step(EOS)[1] == -1.0  # the EOS that could not be scored is not in the response twice
    env = make(keywords, Silent(), on_unscored="truncate")
    ask(env, 0)
    _, reward, terminated, truncated, info = env.step(EOS)
    assert np.isnan(reward)
    assert (terminated, truncated, info["scored"]) == (False, True, False)


def test_the_same_seed_asks_what_the_text_environment_asks(keywords: dict[str, Any]) -> None:
    text = alpacafarm_env.InstructionEnv(dataset=keywords["dataset"], oracle=Brevity())
    token = make(keywords)
    for seed in (5, None, None, 6):
        assert text.reset(seed=seed)[1] == token.reset(seed=seed)[1]


@pytest.mark.parametrize("action", [-1, len(WORDS), 1.0, "hello", None])
def test_an_action_that_is_no_token_is_refused(keywords: dict[str, Any], action: Any) -> None:
    env = make(keywords)
    ask(env, 0)
    with pytest.raises(InvalidAction, match=r"0 to 9"):
        env.step(action)
    assert env.step(EOS)[2]  # and costs nothing


def test_step_before_reset_is_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(ResetNeeded):
        make(keywords).step(EOS)


def test_a_prompt_that_does_not_fit_is_refused_by_name(keywords: dict[str, Any]) -> None:
    env = make(keywords, max_prompt_tokens=3)
    ask(env, 0)  # three tokens
    with pytest.raises(ValueError, match=rf"instruction {env.instructions[1].id} .* has 5"):
        ask(env, 1)
    with pytest.raises(ResetNeeded):
        env.step(EOS)


def test_the_sandboxs_texts_are_never_cut_by_default() -> None:
    env = gym.make("AlpacaFarm-Token-v0", disable_env_checker=True).unwrapped
    assert isinstance(env, TokenEnv)
    positions = json.loads((sandbox.REWARD_MODEL / "config.json").read_text())["max_position_embeddings"]
    assert env.max_prompt_tokens + env.max_response_tokens == positions
    assert env.reset(seed=0)[0]["input_ids"].shape == (positions,)
    rng = np.random.default_rng(0)
    for seed in range(3):
        env.reset(seed=seed)
        ended = False
        while not ended:
            _, _, ended, _, info = env.step(int(rng.integers(len(env.tokenizer))))
        assert info["reward_input_truncated"] is False


def test_cut_by_the_reward_model_and_ended_by_the_limit_are_two_things() -> None:
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
        (4096, {}, (192, 300)),
        (256, {}, (192, 64)),
        (40, {}, (30, 10)),
        (40, {"max_prompt_tokens": 8}, (8, 32)),
        (40, {"max_response_tokens": 16}, (24, 16)),
        (40, {"max_prompt_tokens": 20, "max_response_tokens": 20}, (20, 20)),
    ],
)
@pytest.mark.parametrize("said_by", ["config", "tokenizer"])
def test_the_limits_fit_the_model(
    keywords: dict[str, Any], tmp_path: Path, said_by: str, positions: int | None, given: Any, limits: Any
) -> None:
    length = {"model_max_length": positions} if positions and said_by == "tokenizer" else {}
    folder = save_tokenizer(tmp_path, eos_token="</s>", **length)
    if said_by == "config" and positions:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": positions}))
    env = TokenEnv(keywords["dataset"], oracle=Brevity(), tokenizer=folder, **given)
    assert (env.max_prompt_tokens, env.max_response_tokens) == limits
    assert ask(env, 1)[0]["input_ids"].shape == (sum(limits),)


def test_limits_that_do_not_fit_are_kept_with_a_warning_and_impossible_ones_refused(
    keywords: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tokenizer(tmp_path, eos_token="</s>", model_max_length=10)
    with pytest.warns(UserWarning, match="max_response_tokens"):
        env = make(keywords, tokenizer=folder)
    assert (env.max_prompt_tokens, env.max_response_tokens) == (8, 4)
    for wrong in ({"max_prompt_tokens": 10}, {"max_response_tokens": 10}, {"max_prompt_tokens": -1}):
        with pytest.raises(ValueError, match="max_prompt_tokens"):
            TokenEnv(keywords["dataset"], oracle=Brevity(), tokenizer=folder, **wrong)


def test_a_tokenizer_that_cannot_serve_is_refused(keywords: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        make(keywords, tokenizer=tmp_path / "absent")
    with pytest.raises(DataError, match="tokenizer"):
        make(keywords, tokenizer=tmp_path)  # an empty folder
    with pytest.raises(DataError, match="eos_token"):
        make(keywords, tokenizer=save_tokenizer(tmp_path / "endless", pad_token="<pad>"))
    with pytest.raises(ValueError, match="at least 1"):
        make(keywords, max_response_tokens=0)


def test_a_tokenizer_without_a_padding_token_pads_with_eos(keywords: dict[str, Any], tmp_path: Path) -> None:
    env = make(keywords, tokenizer=save_tokenizer(tmp_path, eos_token="</s>"))
    observation, _ = ask(env, 0)
    assert (observation["input_ids"][observation["attention_mask"] == 0] == EOS).all()


def test_the_sandbox_needs_no_argument() -> None:
    env = gym.make("AlpacaFarm-Token-v0", oracle="constant", disable_env_checker=True).unwrapped
    assert isinstance(env, TokenEnv)
    observation, info = env.reset(seed=0)
    instruction = env.instructions[env.find_instruction(info["instruction_id"])]
    prompt = observation["input_ids"][observation["attention_mask"] == 1]
    assert env.tokenizer.decode(prompt) == env.template.render(instruction)
    assert env.step(env.eos_token_id)[2]


def test_stable_baselines3_ppo_learns_to_be_brief(keywords: dict[str, Any]) -> None:
    oracle = Brevity()
    env = gym.make("AlpacaFarm-Token-v0", **keywords, oracle=oracle, disable_env_checker=True)
    settings = {"n_steps": 64, "batch_size": 32, "learning_rate": 0.01, "gamma": 1.0, "device": "cpu", "seed": 0}
    PPO("MultiInputPolicy", env, **settings).learn(512)
    scores = oracle.score(*zip(*oracle.asked, strict=True))
    first, last = scores[:30], scores[-60:-30]
    assert len(scores) > 200
    assert last.mean() > first.mean() + 1  # of at most 4 words


def test_importing_loads_neither_torch_nor_transformers() -> None:
    root = Path(alpacafarm_env.__file__).parents[1]
    code = "import sys, alpacafarm_env.envs.token; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == "[]"
