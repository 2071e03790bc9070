"""The records of instruction following: an instruction, a demonstration, and what annotators say of responses."""

from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self

RATINGS: Final = range(1, 8)
"""The scale of a rating: 1 (worst) to 7 (best). Source: Ouyang et al. 2022 (arXiv 2203.02155), figure 12."""


class Instruction(str):
    r"""A user's request: an immutable `str` that also remembers its two fields.

    The text is `instruction`, followed by a blank line and `input` when there is one. `id` is unique within a split, -1
    if it has none; `split_name` and `source` (the evaluation set, "selfinstruct", ...) are "" if unknown. `system` is a
    system text that `instruction` begins with, before a blank line, or "": a chat template with a place for it writes
    it there, and all else reads it as part of the text.

    Example:
        >>> ask = Instruction("Translate to French.", "Good morning", id=7, split="eval")
        >>> ask
        'Translate to French.\n\nGood morning'
        >>> ask.input, ask.id
        ('Good morning', 7)
    """

    __slots__ = ("id", "input", "instruction", "source", "split_name", "system")
    instruction: str
    input: str
    id: int
    split_name: str
    source: str
    system: str

    def __new__(
        cls, instruction: str, input: str = "", *, id: int = -1, split: str = "", source: str = "", system: str = ""
    ) -> Self:
        """The names `input` and `id` are AlpacaFarm's own. ValueError if `instruction` does not begin with `system`."""
        if not instruction.startswith(system_front(system)):
            raise ValueError(f"Expected an instruction that begins with {system_front(system)!r}, got {instruction!r}.")
        self = super().__new__(cls, f"{instruction}\n\n{input}" if input else instruction)
        fields = {"instruction": instruction, "input": input, "id": id, "split_name": split, "source": source}
        for name, value in {**fields, "system": system}.items():
            object.__setattr__(self, name, value)
        return self

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"An Instruction is immutable: cannot set {name!r}. Build a new one.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"An Instruction is immutable: cannot delete {name!r}.")

    def __getnewargs_ex__(self) -> tuple[tuple[str, str], dict[str, Any]]:
        named = {"id": self.id, "split": self.split_name, "source": self.source, "system": self.system}
        return (self.instruction, self.input), named

    def __getstate__(self) -> None:
        """Nothing beyond the constructor's arguments: the fields refuse to be set a second time."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def system_front(system: str) -> str:
    """A system text as an instruction begins with it; "" without one."""
    return f"{system}\n\n" if system else ""


@dataclass(frozen=True)
class Demonstration:
    """A response to imitate."""

    instruction: Instruction
    response: str


@dataclass(frozen=True)
class Preference:
    """Two responses and which of them an annotator preferred: `preference` is 1 or 2, as in AlpacaFarm.

    Raises:
        ValueError: There are not two responses, or `preference` is neither 1 nor 2.
    """

    instruction: Instruction
    responses: tuple[str, str]
    preference: int

    def __post_init__(self) -> None:
        if len(self.responses) != 2:
            raise ValueError(f"Expected two responses, got {len(self.responses)}: {self.responses!r}.")
        if self.preference not in (1, 2):
            raise ValueError(f"Expected preference 1 or 2 (the preferred response), got {self.preference!r}.")

    @property
    def chosen(self) -> str:
        """The preferred response."""
        return self.responses[self.preference - 1]

    @property
    def rejected(self) -> str:
        """The other response."""
        return self.responses[2 - self.preference]


@dataclass(frozen=True)
class Labelled:
    """A response that an annotator calls good (`label` True) or bad.

    Raises:
        ValueError: `label` is no bool.
    """

    instruction: Instruction
    response: str
    label: bool

    def __post_init__(self) -> None:
        if not isinstance(self.label, bool):
            raise ValueError(f"Expected a label True (good) or False (bad), got {self.label!r}.")


@dataclass(frozen=True)
class Rating:
    """A response and how good an annotator finds it: `rating` is 1 to 7, 7 the best.

    Raises:
        ValueError: `rating` is no whole number from 1 to 7.
    """

    instruction: Instruction
    response: str
    rating: int

    def __post_init__(self) -> None:
        if isinstance(self.rating, bool) or self.rating not in RATINGS:
            raise ValueError(f"Expected a whole rating from 1 (worst) to 7 (best), got {self.rating!r}.")


@dataclass(frozen=True)
class Critique:
    """A response and what an annotator says of it, in words."""

    instruction: Instruction
    response: str
    critique: str
