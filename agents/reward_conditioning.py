"""Binary reward conditioning: fine-tuning on both responses of every pair, each after a token that says which it is.

Source: AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387), sec. 4, after Keskar et al. 2019 (arXiv:1909.05858) and
Korbak et al. 2023 (arXiv:2302.08582). The loss is that of SFT. AlpacaFarm released weights of it, neither training code
nor settings. So:

1. The settings are those of AlpacaFarm's SFT, with its deviations.
2. The tokens are `<reward_0>` (chosen) and `<reward_1>` (rejected), as in AlpacaFarm's Quark, where 0 is best. The
   module `control_tokens` says how they enter the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..instructions import Demonstration, Preference
from .control_tokens import conditioned, unconditioned
from .language_model import LanguageModel
from .loop import Resume, keyed_generator
from .policy_agent import loaded
from .rollouts import Rollouts
from .sft import SFT, FineTuningConfig

POSITIVE, NEGATIVE = "<reward_0>", "<reward_1>"
"""How the control tokens are spelled: in front of chosen, and of rejected, responses."""


@dataclass(frozen=True, kw_only=True)
class RewardConditioningConfig(FineTuningConfig):
    """Settings of binary reward conditioning, those of SFT; `batch_size` counts responses, two of which make a pair."""


class BinaryRewardConditioning(SFT):
    """SFT on both responses of every pair, after a control token each; `act` and `evaluate` use the positive one.

    The policy gets the two control tokens, unless it has them from an earlier run.

    Args:
        preferences: Settled comparisons; at least one.
        seed: Decides the order of the responses and the jitter of the new embeddings.

    Raises:
        ValueError: There is no preference, all prompts are too long, the policy trains a LoRA adapter, or it has other
            control tokens.
    """

    label: ClassVar[str] = "Reward conditioning"

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        preferences: Sequence[Preference],
        *,
        config: RewardConditioningConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        chosen = [Demonstration(preference.instruction, preference.chosen) for preference in preferences]
        rejected = [Demonstration(preference.instruction, preference.rejected) for preference in preferences]
        config = config or RewardConditioningConfig()
        policy = loaded(policy)
        # Before the prompts are measured: they get one position less.
        self._tokens = policy.add_control_tokens((POSITIVE, NEGATIVE), keyed_generator(seed, "control tokens"))
        super().__init__(policy, chosen + rejected, config=config, seed=seed, out=out, resume=resume)

    def _training_data(self, data: Rollouts) -> Rollouts:
        bare = unconditioned(data, self._tokens)  # the prompts of a conditioned policy begin with the positive token
        tokens = [token for token in self._tokens for _ in range(len(data) // 2)]
        return conditioned(bare, tokens, bos=self.policy.tokenizer.bos_token_id)
