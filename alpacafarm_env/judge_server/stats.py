"""What a judge server has done: counts of requests, faults and of what a provider would have charged."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from .faults import FAULTS
from .responses import HttpReply


class Stats:
    """Counters, safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._statuses: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._charged: dict[str, Counter[str]] = {}
        self._answered = 0

    def count(
        self, model: str, reply: HttpReply, fault: str | None = None, usage: Mapping[str, int] | None = None
    ) -> None:
        """Counts one request.

        Args:
            model: The model asked for, "" for a request that was refused.
            reply: What was replied.
            fault: The fault that fell on it.
            usage: The tokens of the whole answer; None for a refused request.
        """
        billed = usage is not None and (fault is None or FAULTS[fault].billed)
        with self._lock:
            self._statuses["none" if reply.manner == "hang" else str(reply.status)] += 1
            if fault is not None:
                self._faults[fault] += 1
            self._answered += usage is not None and (fault is None or FAULTS[fault].usable)
            if billed and usage is not None:
                charged = self._charged.setdefault(model, Counter())
                charged["requests"] += 1
                charged["prompt_tokens"] += usage["prompt_tokens"]
                charged["completion_tokens"] += usage["completion_tokens"]

    def summary(self) -> dict[str, Any]:
        """All counts as plain data.

        `requests` (for answers, and whatever was refused), `answered` (with the right answer, however odd
        its usage or slow its bytes), `charged` and `charged_by_model` (requests, prompt_tokens and completion_tokens
        that a provider would have billed), `by_status` ("none": no status was sent) and `by_fault`.
        """
        fields = ("requests", "prompt_tokens", "completion_tokens")
        with self._lock:
            by_model = {model: {field: charged[field] for field in fields} for model, charged in self._charged.items()}
            return {
                "requests": self._statuses.total(),
                "answered": self._answered,
                "charged": {field: sum(charged[field] for charged in by_model.values()) for field in fields},
                "charged_by_model": by_model,
                "by_status": dict(sorted(self._statuses.items())),
                "by_fault": dict(sorted(self._faults.items())),
            }
