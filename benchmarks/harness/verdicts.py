"""Claims that a study checks. What a reader is told of one is a line of the study's template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and the numbers that say so."""

    id: str
    """Names the claim: "clean_labels_suffice"."""
    holds: bool | None
    """None: what was measured does not decide it."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What its sentence shows."""
