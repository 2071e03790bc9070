"""A gold for recorded data: boosted trees that were fitted on a real judge's verdicts.

It says how likely the judge is to prefer a new response to the reference, as far as length, form and words tell. It is
no GPT-4 and no person, but whoever was trained on the verdicts of other instructions cannot have seen its own.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from ...data import Dataset
from ...data.recorded import RecordedParts
from ...errors import DataError
from ...oracles.base import DetailedJudge, Verdicts
from ...seeding import keyed_rng
from .features import Array, WordComponents, measured
from .models import accuracy, fit

COMPONENTS: Final = 100
"""Components of words beside the measures."""
TESTED: Final = 0.2
"""Share of its instructions on whose verdicts it is tested, before it is fitted on all."""


class LearnedGold(DetailedJudge):
    """P(b preferred to a), in [0, 1], by trees fitted on the verdicts of every instruction outside split preference.

    They are another kind of model than a reward model of split preference, on other features, instructions and
    verdicts. Fitting takes half a minute for 20,000 verdicts, and draws nothing.

    Attributes:
        accuracy: Share of the verdicts that it tells right on instructions that were left out.
        num_tested: Number of those verdicts.

    Raises:
        DataError: The dataset is no recorded folder that is divided for training, or scikit-learn is missing.
    """

    def __init__(self, dataset: Dataset) -> None:
        if not isinstance(dataset, RecordedParts):
            raise DataError(f"LearnedGold: expected a recorded folder without splits of its own, got {dataset!r}.")
        recorded, proxys = dataset.recorded, set(map(str, dataset.instructions("preference")))
        rows = [
            (text, response, credit)
            for (text, response), credit in recorded.recorded_verdicts().items()
            if credit == credit and credit != 0.5 and text not in proxys
        ]
        references = dict(zip(map(str, recorded.instructions("eval")), recorded.references("eval"), strict=True))
        instructions, responses, credits = zip(*rows, strict=True)
        against = [references[text] for text in instructions]
        texts = list(dict.fromkeys([*responses, *against]))
        self._words = WordComponents(texts, min(COMPONENTS, len(texts) - 1))
        differences = self._features(instructions, responses) - self._features(instructions, against)
        labels = (np.array(credits) > 0.5).astype(np.float64)
        every = list(dict.fromkeys(instructions))
        number = max(1, round(TESTED * len(every)))
        chosen = keyed_rng(0, "instructions that test gold").permutation(len(every))[:number]
        tests = np.isin(instructions, [every[place] for place in chosen])
        tried = fit("trees", differences[~tests], labels[~tests])
        self.accuracy, self.num_tested = accuracy(tried, differences[tests], labels[tests]), int(tests.sum())
        self._score = fit("trees", differences, labels)
        common = max(labels[tests].mean(), 1 - labels[tests].mean())
        self.name = (
            f"learned gold, trees on {len(rows):,} recorded verdicts of {recorded.judge} (right on {self.accuracy:.1%} "
            f"of {self.num_tested:,} on instructions left out, where one answer to all is right on {common:.1%})"
        )

    def judge(self, instructions: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        """P(b preferred) [B]."""
        return Verdicts(expit(self._score(self._features(instructions, b) - self._features(instructions, a))))

    def _features(self, instructions: Sequence[str], texts: Sequence[str]) -> Array:
        """[B, K]: the measures and the components of words; each text once."""
        pairs = list(zip(instructions, texts, strict=True))
        distinct = {pair: row for row, pair in enumerate(dict.fromkeys(pairs))}
        asked, given = ([pair[i] for pair in distinct] for i in (0, 1))
        table = np.hstack([measured(asked, given), self._words(given)])
        order: NDArray[np.int64] = np.array([distinct[pair] for pair in pairs], dtype=np.int64)
        return np.asarray(table[order])
