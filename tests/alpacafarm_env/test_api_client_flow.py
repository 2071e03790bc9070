"""How many requests are in flight: what one client learned holds for the next, and no slot waits for the disk."""

import threading
import time
from concurrent.futures import Future

import pytest
from api_asks import ask
from wire_server import WireServer, failed, ok

from alpacafarm_env.llm import transport as sending
from alpacafarm_env.llm.client import Client
from alpacafarm_env.llm.endpoint import Endpoint
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.store import Ledger
from alpacafarm_env.llm.limits import Limiter
from alpacafarm_env.llm.pricing import Prices

PRICES = Prices.load({"m-1": [1.0, 2.0]})


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


# ------------------------------------------------------------------------------------------------ from client to client


def second_start(limiter):
    """A call that is told to wait half a second and gives up; how long after it the next call's request comes."""
    with WireServer(lambda seen, number: failed(429, retry_after=0.5) if number == 1 else ok()) as server:
        ask(server, config={"max_attempts": 1}, limiter=limiter)
        ask(server, limiter=limiter)
    return server.seen[1].started - server.seen[0].started


def test_a_wait_holds_for_the_next_client():
    limiter = Limiter(32)
    assert second_start(limiter) >= 0.5
    assert limiter.limit == pytest.approx(16, abs=0.1)


def test_twin_with_limits_of_its_own_is_early():
    assert second_start(None) < 0.5


# ------------------------------------------------------------------------------------------------ connections


def test_certificates_are_read_once(monkeypatch):
    contexts = [sending._certificates("a", None) for _ in range(3)] + [sending._certificates("b", None)]
    assert contexts[0] is contexts[1] is contexts[2] is not contexts[3]
    start = time.perf_counter()
    with WireServer() as server:
        for _ in range(20):
            sender = sending.Sender(Endpoint("https://127.0.0.1:1/v1", "k"), timeout_s=1)
            sender.connect()
        assert time.perf_counter() - start < 2
        assert ask(server, 50, config={"max_concurrency": 5})[0]


def test_connections_are_used_again():
    ports = set()

    class Counting(WireServer):
        def _serve(self, connection):
            ports.add(connection.getpeername())
            super()._serve(connection)

    with Counting() as server:
        ask(server, 60, config={"max_concurrency": 6})
    assert len(ports) <= 6


# ------------------------------------------------------------------------------------------------ slots and the disk


class Holding(Client):
    """The twin: a slot is given back after the answer's commit."""

    async def _attempt(self, job, slot):
        self.limiter.release = lambda: None
        try:
            return await super()._attempt(job, slot)
        finally:
            Limiter.release(self.limiter)


def slow_commits(ledger, monkeypatch, seconds):
    """Answers are stored as usual, but it takes so long until their caller hears of it."""
    do = ledger.do

    def slowly(operation, *args, **kwargs):
        future = do(operation, *args, **kwargs)
        if operation is not sql.succeed:
            return future
        later = Future()
        threading.Timer(seconds, lambda: later.set_result(future.result())).start()
        return later

    monkeypatch.setattr(ledger, "do", slowly)


def sent_before_the_commit(tmp_path, monkeypatch, client):
    """Three requests one at a time, each commit half a second: seconds between the first and the last."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger, WireServer() as server:
        slow_commits(ledger, monkeypatch, 0.5)
        ask(server, 3, client=client, ledger=ledger, prices=PRICES, config={"max_concurrency": 1})
    return server.seen[2].started - server.seen[0].started


def test_no_slot_waits_for_the_commit_of_an_answer(tmp_path, monkeypatch):
    assert sent_before_the_commit(tmp_path, monkeypatch, Client) < 0.5


def test_twin_that_holds_its_slot_waits(tmp_path, monkeypatch):
    assert sent_before_the_commit(tmp_path, monkeypatch, Holding) >= 1.0


def in_flight(tmp_path, monkeypatch, client):
    """256 requests, 64 at once, 1.2 s each: how many the server has on average while the middle ones come."""

    def reply(seen, number):
        time.sleep(1.2)  # long beside what a busy machine adds
        return ok()

    with Ledger(tmp_path / "ledger.sqlite") as ledger, WireServer(reply) as server:
        slow_commits(ledger, monkeypatch, 1.2)
        ask(server, 256, client=client, ledger=ledger, prices=PRICES, config={"max_concurrency": 64})
    assert server.most_active == 64
    starts = sorted(seen.started for seen in server.seen)
    return 128 * 1.2 / (starts[224] - starts[96])  # two waves of 64, from the middle of one


def test_the_server_is_kept_busy(tmp_path, monkeypatch):
    assert in_flight(tmp_path, monkeypatch, Client) > 46


def test_twin_that_holds_its_slots_leaves_the_server_idle(tmp_path, monkeypatch):
    assert in_flight(tmp_path, monkeypatch, Holding) < 40
