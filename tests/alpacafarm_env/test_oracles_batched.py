"""One oracle asked by many threads: what waits is asked in one call, and everybody gets their own answer."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from alpacafarm_env.oracles import MicroBatched, OracleError, Verdicts, judge


class Gate:
    """Scores a text by its length, with its first letter as a detail; its calls wait for a gate where there is one."""

    name = "gate"

    def __init__(self, *, closed=False):
        self.calls, self.entered, self.gate = [], threading.Semaphore(0), threading.Event()
        if not closed:
            self.gate.set()

    def judge(self, instructions, responses):
        self.calls.append(responses)
        self.entered.release()
        assert self.gate.wait(10)
        if "bad" in responses:
            raise ValueError("bad")
        if responses[0] == "down":
            raise ConnectionError("down")
        if "stop" in responses:
            raise KeyboardInterrupt
        return Verdicts(np.array([len(text) for text in responses], float), {"first": np.array([*responses])})

    def score(self, instructions, responses):
        return self.judge(instructions, responses).scores


def ask_while_busy(oracle, batches, **options):
    """The first asks, the others come while the oracle answers it: a result or an error of each."""
    batched = MicroBatched(oracle, **options)

    def ask(batch):
        try:
            return judge(batched, ["i"] * len(batch), batch)
        except (ValueError, OSError, KeyboardInterrupt) as error:
            return error

    with ThreadPoolExecutor(len(batches)) as threads:
        found = [threads.submit(ask, batches[0])]
        assert oracle.entered.acquire(timeout=10)
        for place, batch in enumerate(batches[1:], start=1):
            found.append(threads.submit(ask, batch))
            while len(batched._waiting) < place:
                pass
        oracle.gate.set()
        return batched, [each.result(10) for each in found]


def test_waiting_threads_share_the_next_call():
    batches = [["a"], ["bb", "ccc"], ["d"], [], ["eeeee"]]
    oracle = Gate(closed=True)
    batched = MicroBatched(oracle)
    assert judge(batched, [], []).scores.size == 0
    batched, found = ask_while_busy(oracle, [batch for batch in batches if batch])
    assert oracle.calls == [("a",), ("bb", "ccc", "d", "eeeee")]
    assert batched.calls == 2
    for batch, verdicts in zip([batch for batch in batches if batch], found, strict=True):
        assert verdicts.scores.tolist() == [len(text) for text in batch]
        assert verdicts.details["first"].tolist() == batch


def test_calls_have_at_most_max_rows():
    oracle = Gate(closed=True)
    ask_while_busy(oracle, [["a"], ["b"] * 3, ["c"], ["d"] * 9, ["e"]], max_rows=4)
    assert [len(call) for call in oracle.calls] == [1, 4, 9, 1]


def test_nobody_fails_by_another_s_texts():
    _, found = ask_while_busy(Gate(closed=True), [["a"], ["bb"], ["bad"], ["dddd"]])
    assert [each.scores.tolist() for each in (*found[:2], found[3])] == [[1], [2], [4]]
    assert isinstance(found[2], ValueError)


def test_nobody_fails_by_neighbours_that_fail_alike():
    _, found = ask_while_busy(Gate(closed=True), [["a"], ["bad"], ["bb"], ["ccc"], ["bad"]])
    assert [each.scores.tolist() for each in found[2:4]] == [[2], [3]]


def test_outages_fail_all_with_one_call():
    batched, found = ask_while_busy(Gate(closed=True), [["down"]] * 9)
    assert [type(each) for each in found] == [ConnectionError] * 9
    assert batched.calls == 2  # for the first, and for all others
    assert judge(batched, ["i"], ["aa"]).scores.tolist() == [2]


def test_answers_after_a_failure_come_at_once():
    class Waits(Gate):
        def judge(self, instructions, responses):
            if responses == ("bad",):
                assert answered.wait(10)
            return super().judge(instructions, responses)

    def ask(text):
        judge(batched, ["i"], [text])
        answered.set()

    answered, batched = threading.Event(), MicroBatched(Waits(), wait_s=5.0)
    batched._last = 3
    with ThreadPoolExecutor(3) as threads:
        asks = []
        for text in ("a", "c", "bad"):
            asks.append(threads.submit(ask, text))
            while len(batched._waiting) < len(asks) < 3:
                pass
        assert [type(each.exception(20)) for each in asks] == [type(None), type(None), ValueError]


def test_interrupted_leaders_leave_nobody_waiting():
    oracle = Gate(closed=True)
    batched, found = ask_while_busy(oracle, [["a"], ["stop"], ["ccc"]])
    assert isinstance(found[1], KeyboardInterrupt)
    assert isinstance(found[2], OracleError)
    assert judge(batched, ["i"], ["dddd"]).scores.tolist() == [4]


def test_one_thread_alone_never_waits():
    batched = MicroBatched(Gate(), wait_s=60.0)
    for _ in range(3):
        assert judge(batched, ["i"], ["aa"]).scores.tolist() == [2]


def test_waiting_for_others_is_limited():
    oracle = Gate(closed=True)
    batched, _ = ask_while_busy(oracle, [["a"], ["b"], ["c"]], wait_s=0.01)
    done = threading.Event()
    threading.Thread(target=lambda: (judge(batched, ["i"], ["a"]), done.set()), daemon=True).start()
    assert done.wait(5)


def test_many_threads_get_what_they_would_get_alone():
    oracle = Gate()
    batched, asks = MicroBatched(oracle), [[f"{'x' * (n % 7)}{n}"] * (1 + n % 3) for n in range(400)]
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda batch: batched.score(["i"] * len(batch), batch).tolist(), asks))
    assert found == [[len(text) for text in batch] for batch in asks]
    assert sum(map(len, oracle.calls)) == sum(map(len, asks))
    with pytest.raises(ValueError, match="2"):
        batched.score(["i"], ["a", "b"])
