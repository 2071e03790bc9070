"""What the study trains against a reward: an agent of each method that has a policy, and where it is evaluated.

Settings are the sandbox's presets; what differs takes each method far enough from SFT to see what becomes of gold:
docs/studies/overoptimization_tried.md.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ... import agents, sandbox
from ...instructions import Preference
from ..experiment.reward_models import MAX_RESPONSE_TOKENS
from .plans import Plan, Sizes
from .treatments import SeedInputs


def online_settings(sizes: Sizes) -> dict[str, Any]:
    """What PPO and Quark share: the study's number of steps and rollouts, at a constant learning rate."""
    return {
        "total_steps": sizes.ppo_steps,
        "max_response_tokens": MAX_RESPONSE_TOKENS,
        "rollout_batch_size": sizes.rollouts,
        "minibatch_size": min(agents.PPOConfig.sandbox().minibatch_size, sizes.rollouts),
        "schedule": "constant",  # a rate that falls to 0 stops the policy where it is: near the peak
        "save_every": 10,
        "keep_checkpoints": 1,
    }


def ppo_config(sizes: Sizes) -> agents.PPOConfig:
    """With the study's KL penalty."""
    return replace(agents.PPOConfig.sandbox(), **online_settings(sizes), kl_coef=sizes.kl_coef)


def quark_config(sizes: Sizes) -> agents.QuarkConfig:
    """At expert iteration's learning rate, as it stays near SFT at its own, and with the preset's KL penalty."""
    rate = agents.ExpertIterationConfig.sandbox().sft.learning_rate
    return replace(agents.QuarkConfig.sandbox(), **online_settings(sizes), learning_rate=rate)


def expert_iteration_config(sizes: Sizes) -> agents.ExpertIterationConfig:
    """Many rounds, where the paper has one: a round goes no farther than the best-of-n that it imitates."""
    preset = agents.ExpertIterationConfig.sandbox()
    sft = replace(preset.sft, save_every=10, keep_checkpoints=1)
    rounds = max(1, sizes.ppo_steps // 6)
    return replace(
        preset, num_rounds=rounds, num_instructions=sizes.rollouts, max_response_tokens=MAX_RESPONSE_TOKENS, sft=sft
    )


def dpo_config(sizes: Sizes) -> agents.DPOConfig:
    """Epochs are more than its steps take, whatever the number of pairs: `evaluated` says where it ends."""
    return replace(
        agents.DPOConfig.sandbox(),
        epochs=DPO_STEPS * sizes.ppo_steps,
        schedule="constant",
        warmup_steps=8,
        save_every=20,
        keep_checkpoints=1,
    )


DPO_STEPS: Final = 6
"""Steps of DPO, an update each, for one of PPO, which has four."""
CONFIGS: Final[dict[str, Callable[[Sizes], Any]]] = {
    "ppo": ppo_config,
    "quark": quark_config,
    "expert_iteration": expert_iteration_config,
    "dpo": dpo_config,
}
"""Method -> its config."""


def evaluated(method: str, sizes: Sizes) -> list[int]:
    """Where along training a method's policy is evaluated, ascending from 0: after steps, or expert iteration's rounds.

    The last of them is where training ends.
    """
    if method == "expert_iteration":
        return list(range(expert_iteration_config(sizes).num_rounds + 1))
    return [step * (DPO_STEPS if method == "dpo" else 1) for step in sizes.evaluated_steps]


def place_of(agent: Any) -> int:
    """How far an agent is: completed rounds of expert iteration, steps of the others."""
    return agent.num_rounds_done if isinstance(agent, agents.ExpertIteration) else agent.step


def make_agent(plan: Plan, inputs: SeedInputs, pairs: Callable[[], tuple[Preference, ...]]) -> Any:
    """The plan's agent, in its folder; its policy keeps the SFT policy as the reference.

    `pairs` are the labelled ones that the treatment's reward models learn from. DPO learns from them alone.
    """
    policy = agents.LanguageModel.from_pretrained(sandbox.POLICY, max_response_tokens=MAX_RESPONSE_TOKENS)
    policy.add_reference()
    config: Any = CONFIGS[plan.kind](plan.sizes)
    options: dict[str, Any] = {"config": config, "seed": plan.seed, "out": plan.folder}
    if plan.kind == "dpo":
        return agents.DPO(policy, pairs(), **options)
    if plan.kind == "expert_iteration":
        oracle = plan.treatment.proxy(inputs, "unlabeled")
        return agents.ExpertIteration(policy, sandbox.SANDBOX.instructions("unlabeled"), oracle, **options)
    env = plan.treatment.env(inputs, config.rollout_batch_size)
    if plan.kind == "quark":
        return agents.Quark(env, policy, **options)
    start: Path | None = next(iter(inputs.reward_models), None)
    return agents.PPO(env, policy, value_init=start, **options)
