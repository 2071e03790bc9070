"""Binary reward conditioning: fine-tuning on both responses of every pair, each after a token that says which it is.

Source: AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387), sec. 4, after Keskar et al. 2019 (arXiv:1909.05858) and
Korbak et al. 2023 (arXiv:2302.08582). The chosen response is trained on after a positive control token, the rejected
one after a negative one, with the loss of SFT. Answers are sampled after the positive token.

AlpacaFarm released weights of it and no training code, and the paper gives no settings of its own. So:

1. The settings are those of AlpacaFarm's SFT (3 epochs, learning rate 2e-5, batches of 128, cosine).
2. The tokens are `<reward_0>` (positive) and `<reward_1>` (negative), as in AlpacaFarm's Quark, where 0 is best.
3. They are inserted as ids in front of the prompt, behind BOS. No text encodes to one, their logits count as -inf, and
   their embeddings begin at the mean of the others plus jitter (`control_tokens`).
4. Which token an answer begins with is saved with the model, so that a loaded policy is conditioned too.
5. The deviations of `sft` hold here too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..instructions import Demonstration, Preference
from .conditioning import add_control_tokens
from .control_tokens import conditioned, unconditioned
from .language_model import LanguageModel
from .loop import Resume
from .policy_agent import loaded
from .rollouts import Rollouts
from .sft import SFT, FineTuningConfig

POSITIVE, NEGATIVE = "<reward_0>", "<reward_1>"
"""How the control tokens are spelled: in front of chosen, and of rejected, responses."""


@dataclass(frozen=True, kw_only=True)
class RewardConditioningConfig(FineTuningConfig):
    """Settings of binary reward conditioning, those of SFT; `batch_size` counts responses, two of which make a pair."""


class BinaryRewardConditioning(SFT):
    """Fine-tunes a policy on both responses of every pair, after a control token each; a step is one update.

    `act` and `evaluate` use the positive token.

    Args:
        policy: The model to train, in place, or a folder or hub name to load it from. It gets the two control tokens,
            unless it has them from an earlier run.
        preferences: Settled comparisons; those whose prompts are too long for the policy are left out, with a warning.
        config: Settings.
        seed: Decides the order of the responses and the jitter of the new embeddings.
        out: Folder for metrics.jsonl, timing.jsonl and checkpoints; None keeps nothing.
        resume: "auto" continues the newest checkpoint of `out`, "never" refuses a folder that has one.

    Raises:
        ValueError: If there is no preference, all prompts are too long, the policy trains a LoRA adapter, or it has
            other control tokens.
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
        if not preferences:
            raise ValueError("BinaryRewardConditioning needs at least one preference, got none.")
        chosen = [Demonstration(preference.instruction, preference.chosen) for preference in preferences]
        rejected = [Demonstration(preference.instruction, preference.rejected) for preference in preferences]
        config = config or RewardConditioningConfig()
        policy = loaded(policy)
        # Before the prompts are measured, which have one position less then.
        self._tokens = add_control_tokens(policy, (POSITIVE, NEGATIVE), seed=seed)
        super().__init__(policy, chosen + rejected, config=config, seed=seed, out=out, resume=resume)

    def _training_data(self, data: Rollouts) -> Rollouts:
        """The chosen responses, which come first, after the positive token; the rejected ones after the negative."""
        positive, negative = self._tokens
        bare = unconditioned(data, self._tokens)  # the prompts of a conditioned policy begin with the positive token
        num_pairs = len(data) // 2
        tokens = [positive] * num_pairs + [negative] * num_pairs
        return conditioned(bare, tokens, bos=self.policy.tokenizer.bos_token_id)
