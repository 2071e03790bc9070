"""What counts as a list."""

from __future__ import annotations

import re

LIST_ITEM = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
_PUBLISHED_LIST = re.compile(r"^\s*(?:[-*•]|\d+[.)]|\w[.)])", re.MULTILINE)


def has_list(response: str, *, published: bool = False) -> bool:
    """Whether a line starts with a bullet or a number, or by the released analysis's definition also with a letter."""
    return (_PUBLISHED_LIST if published else LIST_ITEM).search(response) is not None
