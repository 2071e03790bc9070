"""What tests do with a ledger: attempts that begin and end, and what is read of them."""

import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

from alpacafarm_env.llm.ledger import operations as sql


def begin(ledger, request_key="r", reserve_usd=0.1, budget_usd=None, label="l", num_questions=1):
    told = {"request_key": request_key, "host": "h", "model": "m", "label": label, "num_questions": num_questions}
    return ledger.do(sql.begin, **told, reserve_usd=reserve_usd, budget_usd=budget_usd, owner=ledger.new_owner())


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
    return ledger.do(sql.claim, questions, owner or ledger.new_owner()).result()


def total(ledger):
    return ledger.do(sql.spending).result().total


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
    """Runs `action` in a forked child; whether it ended well within 10 s."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False
