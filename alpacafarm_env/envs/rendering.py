"""An episode for `render`: as text, or as a picture of that text."""

import math
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
_PAPER, _INK = (255, 255, 255), (20, 20, 20)
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
            verdict = "no verdict" if math.isnan(self.reward) else f"{self.reward:.4f}"
            lines += ["", f"### Reward ({self.oracle})", verdict]
        return "\n".join(lines) + "\n"

    def frame(self) -> Frame:
        """The text drawn, dark on white, uint8 of `FRAME_SHAPE`.

        Long lines are wrapped; a text that is too long loses its middle. Control characters are question marks.
        """
        from PIL import Image, ImageDraw

        lines = _wrapped(self.text())
        if len(lines) > _ROWS:
            lines = [*lines[: _ROWS // 2], _CUT, *lines[-(_ROWS // 2) :]]
        picture = Image.new("RGB", (FRAME_SHAPE[1], FRAME_SHAPE[0]), _PAPER)
        draw = ImageDraw.Draw(picture)
        for row, line in enumerate(lines):
            draw.text((_MARGIN, _MARGIN + row * _LINE_HEIGHT), line, fill=_INK, font=_font())
        return np.array(picture)


def _wrapped(text: str) -> list[str]:
    """The lines of a text, those that are too wide broken at spaces; of a very long text the ends alone."""
    most = _ROWS * _COLUMNS
    if len(text) > 2 * most:
        text = text[:most] + text[-most:]  # more than a picture holds, so its middle, where the two meet, is cut
    printable = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))
    return [
        part
        for line in printable.split("\n")
        for part in textwrap.wrap(line, _COLUMNS, replace_whitespace=False, drop_whitespace=False) or [""]
    ]


@cache
def _font() -> "FreeTypeFont":
    # The one that matplotlib brings has Greek, Cyrillic, accents and symbols; Pillow's own lacks even "é". All its
    # characters are equally wide, as long as none is put together with its neighbours.
    from matplotlib import get_data_path
    from PIL import ImageFont

    path: Any = f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf"
    return ImageFont.truetype(path, _FONT_SIZE, layout_engine=ImageFont.Layout.BASIC)
