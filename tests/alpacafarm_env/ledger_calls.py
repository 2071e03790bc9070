"""What tests do with a ledger, and processes that spend through one.

Run as a script: `python ledger_calls.py '{"processes": 2, ...}'`; it forks so many times. What a server would bill is
appended to a file before the answer is there, as a real one does: whether the client still lives does not matter to it.
"""

import json
import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

from alpacafarm_env.errors import BudgetExceededError
from alpacafarm_env.llm.ledger import Ledger
from alpacafarm_env.llm.ledger import operations as sql

FORK = multiprocessing.get_context("fork")


def begin(ledger, request_key="r", reserve_usd=0.1, budget_usd=None, label="l", questions=("q",)):
    settings = {"request_key": request_key, "host": "h", "model": "m", "label": label, "question_keys": questions}
    return ledger.do(sql.begin, **settings, reserve_usd=reserve_usd, budget_usd=budget_usd, owner=ledger.new_owner())


def succeed(ledger, attempt, questions=("q",), raw='{"label": 1}', cost_usd=0.05, tokens=(10, 2)):
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return ledger.do(sql.succeed, attempt, raw=raw, cost_usd=cost_usd, question_keys=list(questions), **usage)


def fail(ledger, attempt, error="e", *, status=None, state="failed", cost_usd=None):
    return ledger.do(sql.fail, attempt, error=error, status=status, state=state, cost_usd=cost_usd)


def answer(ledger, request_key="r", questions=("q",), raw='{"label": 1}'):
    return succeed(ledger, begin(ledger, request_key).result(), questions, raw).result()


def lookup(ledger, *questions):
    return ledger.do(sql.lookup, questions).result()


def claim(ledger, questions, owner=None):
    return ledger.do(sql.claim, questions, owner or ledger.new_owner()).result().mine


def total(ledger):
    return ledger.do(sql.spending).result().sum()


def attempts(ledger):
    """All rows of `attempts`, the oldest first, with `cost_usd` in dollars."""

    def read(conn):
        cursor = conn.execute("SELECT *, cost / 1e9 AS cost_usd FROM attempts ORDER BY id")
        return [SimpleNamespace(**{c[0]: v for c, v in zip(cursor.description, row, strict=True)}) for row in cursor]

    return ledger.do(read).result()


def read_beside(path, statement):
    """What another connection sees: what is committed."""
    with closing(sqlite3.connect(path)) as conn:
        return conn.execute(statement).fetchall()


def together(threads, action):
    """Runs `action(0)` ... `action(threads - 1)`, each in a thread; returns what they return, or raises."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(action, range(threads)))


def fork(action):
    """Runs `action` in a forked child; whether it ended well within a minute (a busy disk takes 1 s a write)."""
    child = FORK.Process(target=action)
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode == 0


def start(**settings):
    """A worker process; the tests' own checkout comes first on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONWARNINGS": "error"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, __file__, json.dumps(settings)], env=environment, **pipes)


def wait_ready(process):
    assert process.stdout.readline() == b"ready\n", process.stderr.read().decode()


def kill(process):
    process.kill()
    process.communicate()


def finish(process, timeout=120):
    """Waits for a worker that has to end well, and without a word on stderr: "database is locked" included."""
    _, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err.decode()
    assert not err, err.decode()


def append(path, line):
    """One write of one line to a file that many processes append to: whole or not there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def lines(path):
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def spend(settings):
    """Asks until the budget stops it; the server's price is at most the reserve, and known to the server alone."""
    with Ledger(settings["store"], lease_s=settings["lease_s"]) as ledger:
        print("ready", flush=True)
        together(settings["threads"], lambda index: _spend_some(ledger, settings, f"{os.getpid()}/{index}"))


def _spend_some(ledger, settings, name):
    rng, reserve = random.Random(name), settings["reserve_nano"]
    with suppress(BudgetExceededError):
        for number in range(100_000):
            key, nano = f"{name}/{number}", rng.randint(reserve // 4, reserve)
            attempt = begin(ledger, key, reserve / 1e9, settings["budget"]).result()
            append(settings["bills"], f"{key} {nano}")
            time.sleep(settings["latency_s"])
            lost, usd = rng.random() < 0.1, nano / 1e9
            (fail(ledger, attempt, state="unknown") if lost else succeed(ledger, attempt, [], cost_usd=usd)).result()


def main():
    settings = json.loads(sys.argv[1])
    children = [FORK.Process(target=spend, args=(settings,)) for _ in range(settings["processes"])]
    for child in children:
        child.start()
    if not children:
        spend(settings)
    for child in children:
        child.join()
    sys.exit(any(child.exitcode for child in children))


if __name__ == "__main__":
    main()
