"""Processes that ask a toy server through a ledger, or through a store that is broken on purpose (the twins).

Run as a script: `python ledger_workers.py '{"task": "ask", ...}'`; it forks `processes` times. The server bills by
appending to a file of its own before it answers, as a real one would: what the client does with the answer, or whether
it still lives, does not matter to it.
"""

import hashlib
import json
import os
import queue
import random
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from alpacafarm_env.errors import BudgetExceededError
from alpacafarm_env.llm.ledger import operations as sql
from alpacafarm_env.llm.ledger.store import Ledger

HERE = Path(__file__)


def start(**settings) -> subprocess.Popen:
    """A worker process; the tests' own checkout comes first on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONWARNINGS": "error"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, str(HERE), json.dumps(settings)], env=environment, **pipes)


def finish(process: subprocess.Popen, timeout: float = 120) -> str:
    """Waits for a worker that has to end well, and returns what it printed."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err.decode()
    assert not err, err.decode()
    return out.decode()


def question_keys(count: int, first: int = 0) -> list[str]:
    return [hashlib.sha256(b"%d" % index).hexdigest() for index in range(first, first + count)]


def true_label(key: str) -> int:
    return int(key[-1], 16) % 2


def append(path: str, line: str) -> None:
    """One write of one line to a file that many processes append to: whole or not there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def lines(path: str | Path) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def begin(ledger, request_key="r", reserve_usd=0.1, budget_usd=None, label="l", num_questions=1):
    told = {"request_key": request_key, "host": "h", "model": "m", "label": label, "num_questions": num_questions}
    return ledger.do(sql.begin, **told, reserve_usd=reserve_usd, budget_usd=budget_usd, owner=ledger.new_owner())


def succeed(ledger, attempt, questions=("q",), raw='{"label": 1}', cost_usd=0.05, tokens=(10, 2)):
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return ledger.do(sql.succeed, attempt, raw=raw, cost_usd=cost_usd, question_keys=list(questions), **usage)


def answer(ledger, request_key="r", questions=("q",), raw='{"label": 1}'):
    return succeed(ledger, begin(ledger, request_key).result(), questions, raw).result()


def read_beside(path, statement):
    """What another connection sees: what is committed."""
    with closing(sqlite3.connect(path)) as conn:
        return conn.execute(statement).fetchall()


class ToyServer:
    """Bills first, then thinks, then answers."""

    def __init__(self, bills: str, latency_s: float) -> None:
        self.bills, self.latency_s = bills, latency_s

    def answer(self, key: str, nanodollars: int = 1) -> str:
        append(self.bills, f"{key} {nanodollars}")
        time.sleep(self.latency_s)
        return json.dumps({"label": true_label(key), "padding": key * 8})


class LedgerStore:
    """The real thing, used as its documentation says."""

    def __init__(self, settings) -> None:
        self.ledger = Ledger(settings["store"], lease_s=settings["lease_s"])
        self.owner = self.ledger.new_owner()

    def known(self, keys) -> dict[str, int]:
        found = self.ledger.do(sql.lookup, keys).result()
        return {key: json.loads(stored.raw)["label"] for key, stored in found.items()}

    def claim(self, keys) -> list[str]:
        claimed = self.ledger.do(sql.claim, keys, self.owner).result()
        done = list(self.known(claimed))
        self.ledger.do(sql.release, done, self.owner).result()
        return [key for key in claimed if key not in set(done)]

    def ask(self, key: str, server: ToyServer) -> None:
        attempt = begin(self.ledger, f"request {key}", 0.01).result()
        succeed(self.ledger, attempt, [key], server.answer(key), 0.001).result()
        self.ledger.do(sql.release, [key], self.owner).result()

    def close(self) -> None:
        self.ledger.close()


class NoLeaseStore(LedgerStore):
    """Twin: looks, and asks for what is not there; nobody else can see that it is being asked."""

    def claim(self, keys) -> list[str]:
        return list(keys)


class JSONStore:
    """Twin: one JSON file, written anew in place after every answer."""

    def __init__(self, settings) -> None:
        self.path, self.lock = Path(settings["store"]), threading.Lock()
        try:
            self.answers = json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):
            # Old answers make the file as long as a real one, and its writing as slow.
            self.answers = {f"old {i}": 0 for i in range(20_000)}

    def known(self, keys) -> dict[str, int]:
        return {key: self.answers[key] for key in keys if key in self.answers}

    def claim(self, keys) -> list[str]:
        return list(keys)

    def ask(self, key: str, server: ToyServer) -> None:
        label = json.loads(server.answer(key))["label"]
        with self.lock:
            self.answers[key] = label
            self.save()

    def save(self) -> None:
        with self.path.open("w") as file:
            json.dump(self.answers, file)

    def close(self) -> None:
        pass


class AtEndStore(JSONStore):
    """Twin: everything is stored at the end, safely, if there is one."""

    def save(self) -> None:
        pass

    def close(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.answers))
        new.replace(self.path)


STORES = {"ledger": LedgerStore, "no_lease": NoLeaseStore, "json": JSONStore, "at_end": AtEndStore}


def ask(settings) -> None:
    """Answers all questions with 8 threads or so, and acknowledges each in a file once the store has it."""
    store = STORES[settings["kind"]](settings)
    server = ToyServer(settings["bills"], settings["latency_s"])
    keys = question_keys(settings["count"], settings["first"])
    random.Random(settings["order"]).shuffle(keys)
    print("ready", flush=True)
    while missing := _unknown(store, keys):
        # At random: the first of them may all be someone else's, while further on there is work.
        claimed = store.claim(random.sample(missing, min(len(missing), settings["batch"])))
        waiting: queue.SimpleQueue = queue.SimpleQueue()
        for key in claimed:
            waiting.put(key)
        together(settings["threads"], partial(_ask_some, store, server, waiting, settings["acknowledged"]))
        if not claimed:
            time.sleep(0.02)
    store.close()


def _unknown(store, keys) -> list[str]:
    known = store.known(keys)
    return [key for key in keys if key not in known]


def _ask_some(store, server, waiting, acknowledged, _index) -> None:
    with suppress(queue.Empty):
        while True:
            key = waiting.get_nowait()
            store.ask(key, server)
            append(acknowledged, key)


def together(threads: int, action) -> list:
    """Runs `action(0)` ... `action(threads - 1)`, each in a thread; returns what they return, or raises."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(action, range(threads)))


def spend(settings) -> None:
    """Asks until the budget stops it; the server's price is at most the reserve, and known to the server alone."""
    ledger = Ledger(settings["store"], lease_s=settings["lease_s"])
    print("ready", flush=True)
    try:
        together(settings["threads"], lambda index: _spend_some(ledger, settings, f"{os.getpid()}/{index}"))
    finally:
        ledger.close()


def _spend_some(ledger, settings, name) -> None:
    server, rng = ToyServer(settings["bills"], settings["latency_s"]), random.Random(name)
    reserve_nano, owner = settings["reserve_nano"], ledger.new_owner()
    reserve, budget = reserve_nano / 1e9, settings["budget"]
    told = {"host": "toy", "model": "toy", "label": "", "num_questions": 1, "owner": owner}
    tokens = {"prompt_tokens": None, "completion_tokens": None}
    with suppress(BudgetExceededError):
        for number in range(100_000):
            key, nano, lost = f"{name}/{number}", rng.randint(reserve_nano // 4, reserve_nano), rng.random() < 0.1
            arguments = {"request_key": key, "reserve_usd": reserve, **told}
            if settings["kind"] == "ledger":
                attempt = ledger.do(sql.begin, **arguments, budget_usd=budget).result()
                raw = server.answer(key, nano)
                if lost:
                    ending = {"error": "reset", "status": None, "state": "unknown", "cost_usd": None}
                    ledger.do(sql.fail, attempt, **ending).result()
                    continue
            else:  # twin: looks at what was spent, sends, and records afterwards
                if ledger.do(sql.spending).result().total.usd + reserve > budget:
                    return
                raw = server.answer(key, nano)
                attempt = ledger.do(sql.begin, **arguments, budget_usd=None).result()
            ledger.do(sql.succeed, attempt, raw=raw, cost_usd=nano / 1e9, question_keys=[], **tokens).result()


def hold(settings) -> None:
    """Claims questions and waits to be killed, or ends without a word."""
    ledger = Ledger(settings["store"], lease_s=settings["lease_s"])
    if settings["kind"] == "no_beat":  # twin: nothing says that it is alive
        ledger._beat = lambda conn: True
    owner = ledger.new_owner()
    assert len(ledger.do(sql.claim, question_keys(settings["count"]), owner).result()) == settings["count"]
    print("ready", flush=True)
    time.sleep(settings["hold_s"])


def billed(path: str | Path) -> Counter:
    """How often each key was billed."""
    return Counter(line.split()[0] for line in lines(path))


def main() -> None:
    settings = json.loads(sys.argv[1])
    task = {"ask": ask, "spend": spend, "hold": hold}[settings["task"]]
    children = []
    for index in range(settings.get("processes", 0)):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                own = {**settings, "order": index, "first": settings.get("first", 0) + index * settings.get("step", 0)}
                task(own)
                status = 0
            except BaseException:  # noqa: BLE001 - the child must not run on as the tests
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    if not children:
        task(settings)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
