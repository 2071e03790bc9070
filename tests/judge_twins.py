"""A judge server that is wrong in one thing, to show that a check finds it."""

from copy import copy

from alpacafarm_env.judge_server.sandbox_judge import SandboxJudge

_ANSWER = SandboxJudge.answer


def draw_by_request(monkeypatch):
    """Verdicts depend on the whole request, and so on the pairs that share it."""

    def answer(self, question, key):
        twin = copy(self)
        twin._streams = dict.fromkeys(self._streams, key)
        return _ANSWER(twin, question, key)

    monkeypatch.setattr(SandboxJudge, "answer", answer)
