"""An episode for `render`: as text, or as a picture of that text."""

import textwrap
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

Frame: TypeAlias = NDArray[np.uint8]

RENDER_MODES: Final = ("ansi", "human", "rgb_array")

FRAME_SHAPE: Final = (480, 640, 3)
"""Height, width and colours of a picture."""

_MARGIN, _FONT_SIZE, _LINE_HEIGHT = 10, 13, 17
_COLUMNS, _ROWS = 77, 27
_PAPER, _INK, _HEADING = (255, 255, 255), (20, 20, 20), (0, 90, 160)
_CUT = "[...]"


class Episode(NamedTuple):
    """An episode to show: an instruction, then a response to it (so far), then its reward."""

    instruction: str
    response: str | None = None
    reward: float | None = None
    """NaN where the oracle gave no verdict, None where it was not asked yet."""
    oracle: str = ""

    def show(self, render_mode: str) -> "str | Frame | None":
        """The text in mode "ansi", the picture in mode "rgb_array"; mode "human" prints the text."""
        if render_mode == "human":
            print(self.text())
            return None
        return self.frame() if render_mode == "rgb_array" else self.text()

    def text(self) -> str:
        """The whole episode, nothing cut."""
        lines = ["### Instruction", self.instruction]
        if self.response is not None:
            lines += ["", "### Response", self.response]
        if self.reward is not None:
            lines += ["", f"### Reward ({self.oracle})", self._verdict]
        return "\n".join(lines) + "\n"

    def frame(self) -> Frame:
        """The episode drawn as dark text on white, uint8 of `FRAME_SHAPE`.

        Long lines are wrapped; a text that is too long loses its middle. Control characters are question marks.
        """
        from PIL import Image, ImageDraw

        picture = Image.new("RGB", (FRAME_SHAPE[1], FRAME_SHAPE[0]), _PAPER)
        draw = ImageDraw.Draw(picture)
        for row, (line, colour) in enumerate(self._lines()):
            draw.text((_MARGIN, _MARGIN + row * _LINE_HEIGHT), line, fill=colour, font=_font())
        return np.array(picture)

    @property
    def _verdict(self) -> str:
        return "no verdict" if self.reward != self.reward else f"{self.reward:.4f}"  # NaN differs from itself

    def _lines(self) -> list[tuple[str, tuple[int, int, int]]]:
        """At most `_ROWS` lines with their colours."""
        question, answer = _wrapped(self.instruction), _wrapped(self.response or "")
        room = _ROWS - 5  # less two headings, two empty lines and the reward
        question = _cut(question, max(room // 2, room - len(answer)))
        answer = _cut(answer, room - len(question))
        lines = [("Instruction", _HEADING), *((line, _INK) for line in question)]
        if self.response is not None:
            lines += [("", _INK), ("Response", _HEADING), *((line, _INK) for line in answer)]
        if self.reward is not None:
            lines += [("", _INK), (_cut_end(f"Reward {self._verdict} ({self.oracle})"), _HEADING)]
        return lines


def _wrapped(text: str) -> list[str]:
    """The lines of a text, those that are too wide broken at spaces; of a very long text the ends alone."""
    most = _ROWS * _COLUMNS
    if len(text) > 2 * most:
        text = text[:most] + text[-most:]  # more than a picture holds, so `_cut` takes out where the two meet
    printable = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))
    return [
        part
        for line in printable.split("\n")
        for part in textwrap.wrap(line, _COLUMNS, replace_whitespace=False, drop_whitespace=False) or [""]
    ]


def _cut(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: most // 2], _CUT, *lines[len(lines) - (most - most // 2 - 1) :]]


def _cut_end(line: str) -> str:
    return line if len(line) <= _COLUMNS else line[: _COLUMNS - len(_CUT)] + _CUT


@cache
def _font() -> "FreeTypeFont":
    # The one that matplotlib brings has Greek, Cyrillic, accents and symbols; Pillow's own lacks even "é". All its
    # characters are equally wide, as long as none is put together with its neighbours.
    from matplotlib import get_data_path
    from PIL import ImageFont

    path: Any = f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf"
    return ImageFont.truetype(path, _FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
