"""Stable-Baselines3 trains a language model in `AlpacaFarm-Token-v0`: policy, KL penalty, environments, logs.

    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecMonitor

    envs = wrappers.vector.AddScore(gym.make_vec("AlpacaFarm-Token-v0", num_envs=64))
    envs = VecMonitor(TokenVecEnv(envs), "runs/sb3", info_keywords=("gold_reward",))
    PPO(env=envs, **keywords(kl_coef=0.05, seed=0)).learn(20_000, ScoresCallback())

Needs the extra `[sb3]`. A model's own tokenizer belongs to the environment too: `make_vec(..., tokenizer=folder)` goes
with `keywords(folder)`. Our own `PPO` is faster: it samples whole responses, and reads no context again for each token.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import DictInfoToList
from numpy.typing import NDArray
from torch import Tensor, nn

try:
    from stable_baselines3.common.buffers import DictRolloutBuffer
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.distributions import Distribution
    from stable_baselines3.common.policies import ActorCriticPolicy
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.type_aliases import DictRolloutBufferSamples, Schedule
    from stable_baselines3.common.utils import safe_mean
    from stable_baselines3.common.vec_env import VecEnv
    from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
except ImportError as error:
    raise ImportError("alpacafarm_env.agents.sb3 needs Stable-Baselines3: pip install alpacafarm-env[sb3]") from error

from .. import sandbox
from ..envs.token import TokenVectorEnv
from ..last_layer import last_mlp_at
from ..oracles.reward_model import num_positions
from .adapters import trunk_of
from .language_model import LanguageModel
from .prompts import control_tokens
from .sampling import check_attention

READ_AT_ONCE = 16
"""Slots of a rollout whose tokens the reference reads in one pass."""


def keywords(model: str | Path | None = None, *, kl_coef: float = 0.05, **changes: Any) -> dict[str, Any]:
    """Keywords of Stable-Baselines3's PPO: the policy in a folder, that folder as its reference, and `changes` to them.

    None is the sandbox's policy, which the step sizes are for; `kl_coef` is β, in reward units per nat. The discount is
    1, as a response is over when it ends; the value counts a tenth, as it shares the policy's trunk.
    """
    folder = None if model is None else str(model)
    return {
        "policy": LanguageModelPolicy,
        "policy_kwargs": {"model": folder},
        "rollout_buffer_class": KLRolloutBuffer,
        "rollout_buffer_kwargs": {"reference": folder, "kl_coef": kl_coef},
        "gamma": 1.0,
        "vf_coef": 0.1,
        "n_steps": 64,
        "batch_size": 1024,
        "n_epochs": 4,
        "learning_rate": 2e-4,
        **changes,
    }


class TrunkExtractor(BaseFeaturesExtractor):
    """The trunk of a language model: an observation's features [B, d] are the hidden state of its last token."""

    def __init__(self, observation_space: spaces.Dict, trunk: Any) -> None:
        super().__init__(observation_space, trunk.config.get_text_config().hidden_size)
        self.trunk = trunk

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """[B, d] float32."""
        ids, lengths = observations["input_ids"].long(), observations["attention_mask"].sum(1).long()
        return last_states(self.trunk, ids, lengths).float()


def last_states(trunk: Any, ids: Tensor, lengths: Tensor) -> Tensor:
    """The last hidden state [B, d] of each context, right padded; those that others begin with are not read again."""
    whole, part_of = _whole_contexts(ids, lengths)
    rows = torch.tensor(whole, device=ids.device)
    ids = ids[rows, : int(lengths.max())]
    row, last = torch.tensor(part_of, device=ids.device), lengths - 1
    positions = torch.zeros_like(ids, dtype=torch.bool)
    positions[row, last] = True
    with last_mlp_at(trunk, positions):
        # Without a mask: a causal model does not see the padding on the right.
        hidden: Tensor = trunk(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[row, last]


def _whole_contexts(ids: Tensor, lengths: Tensor) -> tuple[list[int], list[int]]:
    """The rows that no other begins with, and for each row the number among these of one that begins with it."""
    table = ids.cpu().numpy().astype(">i4")  # big-endian: bytes have the order of the tokens
    contexts = [row[:length].tobytes() for row, length in zip(table, lengths.tolist(), strict=True)]
    whole: list[int] = []
    part_of = [0] * len(contexts)
    # In this order a context stands right before those that begin with it.
    for row in sorted(range(len(contexts)), key=contexts.__getitem__, reverse=True):
        if not whole or not contexts[whole[-1]].startswith(contexts[row]):
            whole.append(row)
        part_of[row] = len(whole) - 1
    return whole, part_of


class LanguageModelPolicy(ActorCriticPolicy):
    """A language model as Stable-Baselines3's policy: trunk, its output layer over tokens, and a value head of zeros.

    All weights train, or those of the LoRA adapter if `model` is the folder of one. `save` of the algorithm keeps the
    weights; `load` needs the folder for the model's shape. `language_model.save(folder)` writes the model for others.

    Args:
        observation_space: That of `TokenEnv`.
        action_space: As many tokens as the model's tokenizer has.
        lr_schedule: Learning rate by the progress that remains.
        model: Folder or hub name; None: the sandbox's policy.
        use_sde: Must be False.
        optimizer_class: An optimizer of torch.
        optimizer_kwargs: Its keywords but the learning rate.

    Raises:
        ValueError: The spaces are not those of a token environment with this model's tokenizer; or the model is
            conditioned on control tokens, or changes its output layer's logits.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        lr_schedule: Schedule,
        model: str | None = None,
        use_sde: bool = False,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._folder = model
        self.language_model = LanguageModel.from_pretrained(model or sandbox.POLICY)
        check_spaces(observation_space, action_space, self.language_model)
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=[],
            ortho_init=False,  # it would overwrite the model's weights
            features_extractor_class=TrunkExtractor,
            features_extractor_kwargs={"trunk": trunk_of(self.language_model.model)},
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
        )

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        self.action_net = output_layer(self.language_model)
        nn.init.zeros_(self.value_net.weight)
        nn.init.zeros_(self.value_net.bias)
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        self.optimizer = self.optimizer_class(trained, lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]

    def _get_action_dist_from_latent(self, latent_pi: Tensor) -> Distribution:
        return self.action_dist.proba_distribution(
            action_logits=token_logits(self.action_net, latent_pi, self.num_tokens)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the tokenizer; a model may embed more."""
        assert isinstance(self.action_space, spaces.Discrete)
        return int(self.action_space.n)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,  # as Stable-Baselines3 itself
            "model": self._folder,
            "optimizer_class": self.optimizer_class,
            "optimizer_kwargs": self.optimizer_kwargs,
        }


def output_layer(model: LanguageModel) -> nn.Module:
    """The layer that gives a language model's logits."""
    layer: nn.Module = model.model.get_output_embeddings()
    return layer


def token_logits(layer: nn.Module, states: Tensor, num_tokens: int) -> Tensor:
    """[B, num_tokens] float32, of hidden states [B, d]."""
    logits: Tensor = layer(states.to(next(layer.parameters()).dtype))
    return logits[:, :num_tokens].float()


def check_spaces(observation_space: Any, action_space: Any, model: LanguageModel) -> None:
    """See `LanguageModelPolicy`."""
    if not isinstance(observation_space, spaces.Dict) or set(observation_space) != {"input_ids", "attention_mask"}:
        raise ValueError(f"Expected the observations of AlpacaFarm-Token-v0, got {observation_space!r:.200}.")
    base = model.model.get_base_model() if hasattr(model.model, "get_base_model") else model.model
    size, shape = len(model.tokenizer), observation_space["input_ids"].shape
    if not isinstance(action_space, spaces.Discrete) or action_space.n != size:
        raise ValueError(
            f"Expected actions for the {size} tokens of the model's tokenizer, got {action_space!r}. Give the "
            "environment the model's folder, tokenizer=folder, and the policy the same, keywords(folder)."
        )
    if shape is None or shape[0] > num_positions(base.config):
        raise ValueError(
            f"Expected observations of at most {num_positions(base.config)} tokens, the model's positions, got {shape}."
            " Lower the environment's max_prompt_tokens or max_response_tokens."
        )
    check_attention(base, shape[0])
    if control_tokens(base) or not gives_plain_logits(base):
        raise ValueError("Expected a model without control tokens whose logits are its output layer's; use our PPO.")


@torch.no_grad()
def gives_plain_logits(model: Any) -> bool:
    """Whether a model's logits are what its output layer gives, without a scale or a soft cap after it."""
    ids = torch.tensor([[0]], device=model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.allclose(model.get_output_embeddings()(hidden), model(input_ids=ids, use_cache=False).logits)


class KLRolloutBuffer(DictRolloutBuffer):
    """Rollouts whose rewards are less by β (log π - log π_ref) at every token (Ziegler et al. 2019, arXiv:1909.08593).

    Monitors see the environment's rewards, without the penalty. Minibatches hold whole slots, as many as `batch_size`
    has room for, so that the tokens of a response are read together.

    Args:
        reference: Folder or hub name of the frozen reference; None: the sandbox's policy.
        kl_coef: β, reward units per nat.

    Attributes:
        kl: log π - log π_ref of each sampled token, [n_steps, n_envs].
        kl_per_response: Nats, of the rollout before.
    """

    def __init__(self, *args: Any, reference: str | None = None, kl_coef: float = 0.05, **kwargs: Any) -> None:
        if not kl_coef >= 0:
            raise ValueError(f"kl_coef: expected at least 0, got {kl_coef!r}")
        self.kl_coef = kl_coef
        super().__init__(*args, **kwargs)
        self._reference = LanguageModel.from_pretrained(reference or sandbox.POLICY, device=self.device)
        self._reference.model.requires_grad_(False)
        self.kl_per_response = 0.0

    def compute_returns_and_advantage(self, last_values: Tensor, dones: NDArray[Any]) -> None:
        """Takes the penalty off the rewards first."""
        self.kl = self.log_probs - self._reference_logprobs()
        self.kl_per_response = float(self.kl.sum() / max(1, self.episode_starts[1:].sum() + dones.sum()))
        self.rewards -= self.kl_coef * self.kl
        super().compute_returns_and_advantage(last_values, dones)

    def get(  # type: ignore[override]  # as in DictRolloutBuffer
        self, batch_size: int | None = None
    ) -> Generator[DictRolloutBufferSamples, None, None]:
        """Minibatches of whole slots in a random order; all at once without a `batch_size`.

        Raises:
            ValueError: `batch_size` has no room for a slot's `n_steps`.
        """
        if batch_size is not None and batch_size < self.buffer_size:
            raise ValueError(f"Expected a batch_size of at least n_steps={self.buffer_size}, got {batch_size}.")
        if not self.generator_ready:
            for _ in super().get():  # lays the columns out slot by slot
                break
        slots = np.random.permutation(self.n_envs)  # noqa: NPY002  # Stable-Baselines3 draws by this, and seeds it
        count = self.n_envs if batch_size is None else batch_size // self.buffer_size
        steps = np.arange(self.buffer_size)
        for first in range(0, self.n_envs, count):
            yield self._get_samples((slots[first : first + count, None] * self.buffer_size + steps).ravel())

    @torch.no_grad()
    def _reference_logprobs(self) -> NDArray[np.float32]:
        """[n_steps, n_envs]: the log-probability of each sampled token by the reference."""
        trunk, layer = trunk_of(self._reference.model), output_layer(self._reference)
        assert isinstance(self.action_space, spaces.Discrete)
        logprobs_of_reference = np.zeros_like(self.log_probs)
        for first in range(0, self.n_envs, READ_AT_ONCE):
            slots = slice(first, first + READ_AT_ONCE)
            ids, mask = (self.observations[key][:, slots] for key in ("input_ids", "attention_mask"))
            contexts = self.to_torch(ids.reshape(-1, ids.shape[-1]))
            lengths = self.to_torch(mask.sum(-1, dtype=np.int64).ravel())
            logits = token_logits(layer, last_states(trunk, contexts, lengths), int(self.action_space.n))
            tokens = self.to_torch(self.actions[:, slots].reshape(-1, 1)).long()
            logprobs = logits.gather(1, tokens)[:, 0] - logits.logsumexp(1)
            logprobs_of_reference[:, slots] = logprobs.cpu().numpy().reshape(self.buffer_size, -1)
        return logprobs_of_reference


class ScoresCallback(BaseCallback):
    """Logs rollout/kl, nats a response to the reference, and the mean of each info that the monitor keeps.

    With `VecMonitor(..., info_keywords=("gold_reward",))` that is rollout/gold_reward, beside rollout/ep_rew_mean.
    """

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        buffer = self.locals["rollout_buffer"]
        if isinstance(buffer, KLRolloutBuffer):
            self.logger.record("rollout/kl", buffer.kl_per_response)
        episodes = list(self.model.ep_info_buffer or ())
        for key in sorted({key for episode in episodes for key in episode} - {"r", "l", "t"}):
            self.logger.record(f"rollout/{key}", safe_mean([episode[key] for episode in episodes]))


class TokenVecEnv(VecEnv):
    """A batched `AlpacaFarm-Token-v0`, in wrappers of rewards or bare, as Stable-Baselines3's vector of environments.

    Args:
        env: What `gym.make_vec("AlpacaFarm-Token-v0", num_envs=n)` gives.

    Raises:
        TypeError: It is another environment.
        ValueError: It resets otherwise than in the same step, or goes on without verdicts, on which nothing can train.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        base = getattr(env, "unwrapped", None)
        if not isinstance(base, TokenVectorEnv):
            raise TypeError(f"Expected gym.make_vec('AlpacaFarm-Token-v0', num_envs=n), got {env!r}.")
        if env.metadata["autoreset_mode"] is not AutoresetMode.SAME_STEP or base.truncates_unscored:
            raise ValueError('Expected an environment with autoreset_mode="SameStep" and on_unscored="raise".')
        self.env: Any = env
        self._with_rows: Any = DictInfoToList(env)
        self._actions: NDArray[Any] = np.zeros(0)
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> VecEnvObs:
        """Observations, arrays [B, L]."""
        if any(self._options):
            raise ValueError(f"Expected no options, which slots of one environment share, got {self._options!r}.")
        observations, self.reset_infos = self._with_rows.reset(seed=self._seeds)
        self._reset_seeds()
        result: VecEnvObs = observations
        return result

    def step_async(self, actions: NDArray[Any]) -> None:
        """Keeps the actions, integers [B], for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Steps. A slot's info is that of its episode's end, with `terminal_observation`, where it has one."""
        observations, rewards, terminations, truncations, rows = self._with_rows.step(self._actions)
        dones = terminations | truncations
        for slot in np.flatnonzero(dones).tolist():
            final, observed = rows[slot].pop("final_info"), rows[slot].pop("final_obs")
            self.reset_infos[slot] = rows[slot]
            rows[slot] = {**final, "terminal_observation": observed}
        for row in rows:
            row["TimeLimit.truncated"] = False  # a limit ends a response for good
        return observations, rewards.astype(np.float32), dones, rows

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """The batched environment's attribute, once a slot."""
        return [getattr(self.env, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Refused: slots have no attributes of their own."""
        raise NotImplementedError(f"Slots of one batched environment share {attr_name!r}: set it on `env`.")

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        """Refused: slots have no methods of their own."""
        raise NotImplementedError(f"Slots of one batched environment share {method_name!r}: call it on `env`.")

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        """Whether a slot is wrapped by itself: never."""
        return [False] * len(list(self._get_indices(indices)))
