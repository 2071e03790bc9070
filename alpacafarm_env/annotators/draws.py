"""The draws of the released AlpacaFarm and AlpacaEval, bit for bit, to recompute their runs.

They are keyed on the instruction's text alone: whatever the responses are, one instruction has one annotator, one order
and one noise decision. That is harmless for a set with one pair an instruction, and wrong for the reward of an agent
that answers each instruction many times: the default is `oracles.draws.KeyedDraws`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from ..oracles.draws import Row, check_count


@dataclass(frozen=True)
class AlpacaFarmDraws:
    """Python's `random.Random` seeded with a text of purpose, instruction and seed (the released default is 0).

    Releases differ in what counts as the instruction. Until July 2023 it was the instruction without its input; later
    AlpacaEval joined both by an empty line, and AlpacaFarm without anything between. The two runs whose allocation the
    authors logged used the instruction without its input; order and noise of the recorded AlpacaEval judgements used
    the joined text; all at seed 0. So `annotators` reads the `instruction` of an `Instruction`, and `b_first` and
    `noise` its text; of any other text, all three read that text.

    Example:
        >>> AlpacaFarmDraws().b_first([("Name a colour.", "Red.", "Blue."), ("Name a colour.", "x", "y")])
        array([ True,  True])
    """

    seed: int = 0

    def annotators(self, rows: Sequence[Row], count: int) -> NDArray[np.int64]:
        """The index of each instruction's annotator in the pool's order, [B] in [0, count).

        Raises:
            ValueError: `count` is not positive.
        """
        check_count(count)
        alone = [(getattr(text, "instruction", text), a, b) for text, a, b in rows]
        return np.array([self._random("annotator", row).choices(range(count))[0] for row in alone], np.int64)

    def b_first(self, rows: Sequence[Row]) -> NDArray[np.bool_]:
        """Whether b is shown before a, [B]: the same for (b, a), so a preference for one position does not cancel."""
        purpose = "is_switched_outputs"
        return np.array([self._random(purpose, row).choices((False, True))[0] for row in rows], bool)

    def noise(self, rows: Sequence[Row], p: float) -> NDArray[np.float64]:
        """The label that replaces the annotator's, [B]: 1 = a preferred, 2 = b preferred, NaN = no noise.

        A share 2p of the labels is drawn, so p of them are flipped; identical responses, which the released code then
        calls a tie, get one too.

        Raises:
            ValueError: `p` is not within 0 and 0.5.
        """
        if not 0 <= p <= 0.5:
            raise ValueError(f"Noise needs a probability p from 0 to 0.5 (0.5 = a coin, no annotator), got {p!r}.")
        labels, weights = (float("nan"), 1.0, 2.0), (1 - 2 * p, p, p)
        return np.array([self._random("noisy_preference", row).choices(labels, weights)[0] for row in rows], np.float64)

    def _random(self, purpose: str, row: Row) -> Random:
        # As bytes, which seed as their text does: a lone surrogate cannot be encoded otherwise.
        return Random(f"{purpose}{row[0]}{self.seed}".encode("utf-8", "surrogatepass"))
