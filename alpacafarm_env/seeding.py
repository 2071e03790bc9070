"""Random numbers keyed by content, which no order, batch or process changes; the environments' instruction streams."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_BLOCK = 64
"""Draws taken from a generator at once: calling it costs 30 times as much as one draw."""


def _encode(part: str | int) -> bytes:
    """Tagged by type and prefixed by length, so that no two different keys share their bytes."""
    # "surrogatepass": any str must have a key, even one that cannot be written as UTF-8.
    tag, body = (b"s", part.encode("utf-8", "surrogatepass")) if isinstance(part, str) else (b"i", b"%d" % part)
    return tag + len(body).to_bytes(8, "little") + body


def keyed_rng(seed: int, *content: str | int) -> np.random.Generator:
    """A generator that depends on nothing but `seed` and `content`; order and types matter ("1" is not 1).

    Example:
        >>> keyed_rng(0, "a", "b").random() == keyed_rng(0, "a", "b").random()
        True
        >>> keyed_rng(0, "ab").random() == keyed_rng(0, "a", "b").random()
        False
    """
    key = blake2b(b"".join(map(_encode, (seed, *content))), digest_size=32).digest()
    return np.random.default_rng(int.from_bytes(key, "little"))


def keyed_uniforms(seed: int, stream: str, rows: Sequence[tuple[str, ...]]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, [B], each keyed on (seed, stream, row) alone; `stream` says what they are for."""
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

    Single and batched environments share it, so a slot sees the same instructions in both.
    """

    def __init__(self, generator: np.random.Generator, size: int) -> None:
        self.generator = generator
        self.size = size
        self._block: list[int] = []

    def draw(self) -> int:
        """The next index."""
        if not self._block:
            self._block = self.generator.integers(self.size, size=_BLOCK).tolist()
            self._block.reverse()
        return self._block.pop()
