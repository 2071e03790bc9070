"""What an `ask` says that it cost: all its attempts, as the ledger counts them; and usage that cannot be."""

import logging
import socket
from contextlib import ExitStack
from math import isnan
from types import SimpleNamespace

import pytest
from api_asks import ask, chat
from wire_server import WireServer, failed, http, ok

from alpacafarm_env.errors import ContentRefusedError, TransientAPIError
from alpacafarm_env.llm.attempts import AttemptRecorder
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.store import Ledger
from alpacafarm_env.llm.pricing import Prices

PRICES = Prices.load({"m-1": [1.0, 2.0]})
BILLED = 13e-6
RESERVE = PRICES.upper_bound("m-1", chat("", "Question 0?").bounds)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr("alpacafarm_env.llm.client.WAIT_INITIAL_S", 0.02)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


ENDS = {
    "one answer": ([ok()], BILLED),
    "free failures first": ([failed(500, retry_after_ms=1), failed(429, retry_after_ms=1), ok()], BILLED),
    "a billed failure first": ([ok(None), ok()], 2 * BILLED),
    "maybe billed first": ([[ok()[:150], None], ok()], RESERVE + BILLED),
    "hung up on first": ([[None], ok()], RESERVE + BILLED),
    "never an answer": ([ok(None)] * 3, 3 * BILLED),
    "filtered": ([http(200, b"cut"), ok("No.", reason="content_filter")], RESERVE + BILLED),
    "refused": ([failed(504, retry_after_ms=1), failed(413)], RESERVE),
}


def costs(tmp_path, responses):
    """What the ask says, and what the ledger counts."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger, WireServer(lambda seen, n: responses[n - 1]) as server:
        (result,), _ = ask(server, ledger=ledger, prices=PRICES, config={"max_attempts": 3})
        assert len(server.seen) == len(responses)
        return result, ledger.do(sql.spending).result().total.usd


@pytest.mark.parametrize("end", ENDS)
def test_all_attempts_are_in_the_cost(tmp_path, end):
    responses, expected = ENDS[end]
    result, counted = costs(tmp_path, responses)
    assert result.cost_usd == pytest.approx(expected)
    assert counted == pytest.approx(expected, abs=1e-8)
    kinds = {"never an answer": TransientAPIError, "filtered": ContentRefusedError, "refused": ContentRefusedError}
    assert isinstance(result, kinds[end]) if end in kinds else result.attempts == len(responses)


@pytest.mark.parametrize("listens", [False, True], ids=["refused", "no handshake"])
def test_what_never_left_costs_nothing(tmp_path, listens):
    with ExitStack() as opened, Ledger(tmp_path / "ledger.sqlite") as ledger:
        silent = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        nobody = SimpleNamespace(url=f"https://127.0.0.1:{silent.getsockname()[1]}/v1")
        if not listens:
            opened.close()
        limits = {"max_attempts": 2, "attempt_timeout_s": 1.0}
        (result,), _ = ask(nobody, ledger=ledger, prices=PRICES, config=limits)
        assert isinstance(result, TransientAPIError)
        assert result.cost_usd == ledger.do(sql.spending).result().total.usd == 0


def test_twin_that_tells_the_last_attempt_alone(tmp_path, monkeypatch):
    failed_row = AttemptRecorder.failed

    def forgets(self, job, *args):
        row = failed_row(self, job, *args)
        job.cost_usd = 0.0
        return row

    monkeypatch.setattr(AttemptRecorder, "failed", forgets)
    result, counted = costs(tmp_path, ENDS["a billed failure first"][0])
    assert result.cost_usd < counted


def test_a_request_that_ran_out_of_time_counts_its_reserve(tmp_path):
    def reply(seen, number):
        yield 5.0

    with Ledger(tmp_path / "ledger.sqlite") as ledger, WireServer(reply) as server:
        (error,), _ = ask(server, ledger=ledger, prices=PRICES, config={"deadline_s": 0.3})
    assert error.cost_usd == RESERVE


def test_without_a_price_only_what_was_not_billed_has_a_cost():
    with WireServer(lambda seen, number: failed(400)) as server:
        assert ask(server)[0][0].cost_usd == 0
    with WireServer(lambda seen, number: ok("x", reason="content_filter")) as server:
        assert isnan(ask(server)[0][0].cost_usd)


# ------------------------------------------------------------------------------------------------ usage that cannot be


def warned(caplog, usage, **settings):
    """The warnings about 20 replies with this usage, and the cost of one."""
    caplog.clear()
    with WireServer(lambda seen, number: ok(usage=usage)) as server, caplog.at_level(logging.WARNING, "alpacafarm_env"):
        answers, _ = ask(server, 20, prices=PRICES, **settings)
    return [record.getMessage() for record in caplog.records if record.name.startswith("alpacafarm_env")], answers


@pytest.mark.parametrize(("usage", "told"), [((0, 3), "0 prompt"), ((7, 10**12), "1000000000000 c"), ((-9, 1), "-9 p")])
def test_usage_that_cannot_be_is_told_once_with_both_numbers(caplog, usage, told):
    (warning,), answers = warned(caplog, usage)
    assert told in warning
    assert "can be" in warning
    assert "'m-1'" in warning
    assert all(answer.cost_usd > 0 for answer in answers)


def test_usual_or_no_usage_is_not_told(caplog):
    assert warned(caplog, (7, 3))[0] == []
    assert warned(caplog, None)[0] == []


def test_twin_that_remembers_no_model_tells_all(caplog, monkeypatch):
    class Forgetful(set):
        def add(self, model):
            pass

    monkeypatch.setattr("alpacafarm_env.llm.attempts.set", Forgetful, raising=False)
    assert len(warned(caplog, (0, 3))[0]) == 20
