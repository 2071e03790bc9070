"""What people are shown: an instruction, and one output or two."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..instructions import Instruction


@dataclass(frozen=True)
class Task:
    """Something to judge; `record` is what is exported of it, a judge's own verdict that it came with included."""

    instruction: Instruction
    outputs: tuple[str, ...]
    record: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """What identifies it in the database: its texts, whatever else its file says."""
        texts = [str(self.instruction), *self.outputs]
        return hashlib.sha256(json.dumps(texts, ensure_ascii=True).encode()).hexdigest()

    def agrees(self, grade: int) -> bool:
        """Whether a grade agrees with the verdict that it came with; False without one."""
        raise NotImplementedError
