"""Judge servers that are wrong in one thing, to show that a check finds it."""

from collections import Counter
from copy import copy
from dataclasses import replace

from alpacafarm_env.judge_server.sandbox_judge import SandboxJudge

_ANSWER = SandboxJudge.answer


def draw_by_request(monkeypatch):
    """Verdicts depend on the whole request, and so on the pairs that share it."""

    def answer(self, question, key):
        twin = copy(self)
        twin._streams = dict.fromkeys(self._streams, key)
        return _ANSWER(twin, question, key)

    monkeypatch.setattr(SandboxJudge, "answer", answer)


def draw_by_arrivals(monkeypatch):
    """Verdicts depend on how often a request came."""
    arrived = Counter()

    def answer(self, question, key):
        arrived[id(self), key] += 1
        return _ANSWER(self, replace(question, seed=arrived[id(self), key]), key)

    monkeypatch.setattr(SandboxJudge, "answer", answer)


def ignore_the_requests_seed(monkeypatch):
    """Verdicts depend on the server's seed alone."""
    monkeypatch.setattr(SandboxJudge, "answer", lambda self, asked, key: _ANSWER(self, replace(asked, seed=None), key))
