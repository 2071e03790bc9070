"""The space of all texts: any Unicode string but those with lone surrogates."""

import copy
import string
import sys
from collections.abc import Iterable
from typing import Any, Final, Self

import numpy as np
from gymnasium.error import CustomSpaceError, DependencyNotInstalled
from gymnasium.spaces import Space, Text, Tuple
from gymnasium.vector.utils import batch_space, create_shared_memory
from numpy.typing import NDArray

MAX_TEXT_LENGTH: Final = 2**20
"""Longest instruction or response, in code points."""

_SAMPLE_LENGTH: Final = 64
_PRINTABLE: Final = string.digits + string.ascii_letters + string.punctuation + " "


def find_surrogate(text: str) -> int:
    """The position of the first lone surrogate, -1 if there is none."""
    if text.isascii():  # O(1), and true of most responses
        return -1
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return -1


class _AllCharacters:
    """Every Unicode character by its code point, none of them stored: that would take seconds and megabytes."""

    def __len__(self) -> int:
        return sys.maxunicode + 1

    def __getitem__(self, index: int) -> str:
        return chr(index)


class UnicodeText(Text):
    """Strings of `min_length` to `max_length` code points, of any character but lone surrogates.

    Gymnasium's own `Text` accepts letters and digits only by default. `sample` draws short printable ASCII.
    `AsyncVectorEnv(shared_memory=True)` is refused: it decodes text once, at construction, and would return that text
    forever.
    """

    def __init__(
        self, max_length: int = MAX_TEXT_LENGTH, *, min_length: int = 0, seed: int | np.random.Generator | None = None
    ) -> None:
        super().__init__(max_length, min_length=min_length, charset=_PRINTABLE, seed=seed)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a string of a legal length that can be written as UTF-8."""
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length and find_surrogate(x) < 0

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A printable ASCII string at most 64 code points above `min_length`; ValueError for a mask."""
        if mask is not None or probability is not None:
            raise ValueError("Expected no mask: it would have an entry for every Unicode character.")
        longest = min(self.max_length, self.min_length + _SAMPLE_LENGTH)
        length = self.np_random.integers(self.min_length, longest, endpoint=True)
        return "".join(_PRINTABLE[i] for i in self.np_random.integers(len(_PRINTABLE), size=length))

    @property
    def character_list(self) -> Any:
        """Every Unicode character."""
        return _AllCharacters()

    character_set = character_list

    def character_index(self, char: str) -> np.int32:
        """The code point."""
        return np.int32(ord(char))

    def __getattr__(self, name: str) -> Any:
        # Stable-Baselines3 asks each space of observations for this, then fails at a shape that texts do not have.
        if name == "spaces" and sys._getframe(1).f_globals.get("__name__", "").startswith("stable_baselines3."):
            raise CustomSpaceError(
                "Stable-Baselines3 expected observations of numbers, got texts: its policies read none. Take "
                "AlpacaFarm-Token-v0 with alpacafarm_env.agents.sb3, as docs/guides/stable_baselines3.md shows."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = copy.copy(self)  # everything but the generator is immutable
        twin._np_random = copy.deepcopy(self._np_random, memo)
        return twin

    def __repr__(self) -> str:
        return f"UnicodeText({self.min_length}, {self.max_length})"

    def __eq__(self, other: object, /) -> bool:
        bounds = (self.min_length, self.max_length)
        return isinstance(other, UnicodeText) and bounds == (other.min_length, other.max_length)

    __hash__ = None  # type: ignore[assignment]  # mutable (it holds a generator), as every Gymnasium space


@batch_space.register(UnicodeText)
def _batch(space: UnicodeText, n: int = 1) -> Space[Any]:
    """As Gymnasium batches a `Text`, but an unseeded space gives unseeded spaces: seeding 100,000 takes time."""
    if vars(space)["_np_random"] is not None:
        return batch_space.dispatch(Text)(space, n)
    return Tuple(tuple(copy.deepcopy(space) for _ in range(n)))


@create_shared_memory.register(UnicodeText)
def _refuse_shared_memory(space: UnicodeText, n: int = 1, ctx: Any = None) -> Any:
    raise CustomSpaceError(
        "UnicodeText has no shared-memory form: AsyncVectorEnv would return the first text for ever. "
        "Pass shared_memory=False, or use the natively batched environment of gym.make_vec."
    )


def _leave_texts_alone() -> None:
    """Gymnasium's `NumpyToTorch` and its like would replace a text, a response too, by "<generator object ...>".

    An array of objects, as the infos of a batch hold, would be an error. What they make of numbers stays theirs.
    """
    try:
        from gymnasium.wrappers.array_conversion import array_conversion
    except (ImportError, DependencyNotInstalled):  # nor are there these wrappers
        return

    @array_conversion.register(str)
    def keep(value: str, xp: Any, device: Any = None) -> str:
        return value

    @array_conversion.register(np.ndarray)
    def convert(value: NDArray[Any], xp: Any, device: Any = None) -> Any:
        if value.dtype != object:
            return array_conversion.dispatch(Iterable)(value, xp, device)
        converted = np.empty_like(value)
        for place, each in np.ndenumerate(value):
            converted[place] = array_conversion(each, xp, device)
        return converted


_leave_texts_alone()
