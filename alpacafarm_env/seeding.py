"""Local randomness: streams keyed by content, and the streams that environments draw instructions from.

Nothing here reads or writes a global generator. A value keyed on content does not depend on the order, the batch or
the process it is asked in; a stream depends on its generator alone.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_BLOCK = 64
"""Draws taken from a generator at once: amortises its call overhead, which is 30 times the cost of one draw."""


def _encode(part: str | int) -> bytes:
    """One part of a key, tagged by type and prefixed by length, so that no two different keys share their bytes."""
    # "surrogatepass": any str must have a key, even one that cannot be written as UTF-8.
    tag, body = (b"s", part.encode("utf-8", "surrogatepass")) if isinstance(part, str) else (b"i", b"%d" % part)
    return tag + len(body).to_bytes(8, "little") + body


def keyed_rng(seed: int, *content: str | int) -> np.random.Generator:
    """A generator that depends on nothing but `seed` and `content`, the same on every platform and in every process.

    Args:
        seed: The seed of the run or of the oracle.
        *content: What the draw is about: names, texts, indices. Order and types matter ("1" is not 1).

    Example:
        >>> keyed_rng(0, "a", "b").random() == keyed_rng(0, "a", "b").random()
        True
        >>> keyed_rng(0, "ab").random() == keyed_rng(0, "a", "b").random()
        False
    """
    key = blake2b(b"".join(map(_encode, (seed, *content))), digest_size=32).digest()
    return np.random.default_rng(int.from_bytes(key, "little"))


def keyed_uniforms(seed: int, stream: str, rows: Sequence[tuple[str, ...]]) -> NDArray[np.float64]:
    """One uniform number in [0, 1) per row, [B], each keyed on (seed, stream, row) alone; one hash a row.

    Args:
        seed: The seed of the oracle.
        stream: What the numbers are for ("flip", "order"), so that two uses of one row are independent.
        rows: The content of each row, such as (instruction, response).
    """
    start = blake2b(_encode(seed) + _encode(stream), digest_size=8)
    digests = bytearray()
    for row in rows:
        key = start.copy()
        key.update(b"".join(map(_encode, row)))
        digests += key.digest()
    # The top 53 bits fill a double's mantissa exactly, which is what keeps 1.0 out.
    bits: NDArray[np.uint64] = np.frombuffer(digests, dtype="<u8") >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


class IndexStream:
    """Uniform draws from range(size) with replacement, taken from one generator in blocks.

    Used for the instructions of one environment slot: single and batched environments share this class, so a slot
    sees the same instructions in both. Plain data, hence safe to deep-copy and pickle.
    """

    def __init__(self, generator: np.random.Generator, size: int) -> None:
        self.generator = generator
        self.size = size
        self._block: list[int] = []

    def draw(self) -> int:
        """The next index, in [0, size)."""
        if not self._block:
            self._block = self.generator.integers(self.size, size=_BLOCK).tolist()
            self._block.reverse()
        return self._block.pop()
