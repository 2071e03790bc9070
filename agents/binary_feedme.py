"""Binary FeedME: supervised fine-tuning on the preferred response of every pair.

Source: AlpacaFarm (Dubois et al. 2023, arXiv:2305.14387), sec. 4, after OpenAI's FeedME, which trains on the responses
that people rated best; here the rating is binary. The loss is that of SFT, on the chosen responses alone.

AlpacaFarm released weights of it and no training code, and the paper gives no settings of its own. So:

1. The settings are those of AlpacaFarm's SFT (3 epochs, learning rate 2e-5, batches of 128, cosine).
2. The deviations of `sft` hold here too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..instructions import Demonstration, Preference
from .language_model import LanguageModel
from .loop import Resume
from .sft import SFT, FineTuningConfig


@dataclass(frozen=True, kw_only=True)
class BinaryFeedMEConfig(FineTuningConfig):
    """Settings of Binary FeedME, those of SFT; `batch_size` counts pairs, of which only the chosen half is read."""


class BinaryFeedME(SFT):
    """Fine-tunes a policy on the chosen response of every pair; a step is one update.

    Args:
        policy: The model to train, in place, or a folder or hub name to load it from.
        preferences: Settled comparisons; the rejected responses are not used. Those whose prompts are too long for the
            policy are left out, with a warning.
        config: Settings.
        seed: Decides the order of the pairs.
        out: Folder for metrics.jsonl, timing.jsonl and checkpoints; None keeps nothing.
        resume: "auto" continues the newest checkpoint of `out`, "never" refuses a folder that has one.

    Raises:
        ValueError: If there is no preference, or the prompts of all are too long.
    """

    label: ClassVar[str] = "Binary FeedME"

    def __init__(
        self,
        policy: LanguageModel | str | Path,
        preferences: Sequence[Preference],
        *,
        config: BinaryFeedMEConfig | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        resume: Resume = "auto",
    ) -> None:
        if not preferences:
            raise ValueError("BinaryFeedME needs at least one preference, got none.")
        chosen = [Demonstration(preference.instruction, preference.chosen) for preference in preferences]
        super().__init__(policy, chosen, config=config or BinaryFeedMEConfig(), seed=seed, out=out, resume=resume)
