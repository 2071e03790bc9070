"""The ledger's operations: functions of a connection, which `Ledger.do` runs on the writer thread in a transaction.

Money is kept in whole nanodollars: sums of integers do not depend on their order. Beats are in `time.monotonic()`,
which all processes of a machine share; one from the future is from before a restart of the machine, and dead.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...errors import BudgetExceededError, LedgerError, PriceError

if TYPE_CHECKING:
    import pandas as pd

NANO = 10**9
"""Nanodollars in a dollar: a token of the cheapest model costs 50."""
MAX_ERROR_CHARS = 1_000
MAX_USD = 10**9
"""Largest amount accepted, so that sums stay within SQLite's integers."""


@dataclass(frozen=True)
class Owner:
    """One call's name as a claimant: calls of one process, even of one handle, are different claimants."""

    handle: str  # the open ledger; its writer thread beats for it
    call: int
    lease_s: float  # seconds after which a handle that no longer beats is dead


class Stored(NamedTuple):
    """A stored answer to a question."""

    raw: str  # the whole body of the reply as it came
    request_key: str
    position: int  # the question's index in that request, 0 ... size - 1
    size: int  # questions in that request
    tries: int  # how often the question was answered alone (in requests of size 1)


class Claimed(NamedTuple):
    """A call's questions: answered, or its own to ask; others belong to other calls."""

    stored: dict[str, Stored]  # the answers of those that have one
    mine: list[str]  # those that this call is to ask about


def lookup(conn: Connection, question_keys: Sequence[str]) -> dict[str, Stored]:
    """The stored answers of those questions that have one; LedgerError if a row does not match its digest."""
    rows = conn.execute(
        """SELECT l.question, l.request_key, l.position, l.size, l.tries, l.sha256, r.raw, r.sha256
        FROM json_each(?) AS wanted JOIN links AS l ON l.question = wanted.value
        LEFT JOIN replies AS r ON r.request_key = l.request_key""",
        (json.dumps(list(question_keys)),),
    )
    stored = {}
    for question, request_key, position, size, tries, link_digest, raw, digest in rows:
        if link_digest != _digest(question, request_key, position, size, tries):
            raise LedgerError(_damaged("the link", question))
        stored[question] = Stored(_checked(request_key, raw, digest), request_key, position, size, tries)
    return stored


def claim(conn: Connection, question_keys: Sequence[str], owner: Owner, again: Collection[str] = ()) -> Claimed:
    """Reads the stored answers, and leases to `owner` what has none, and `again`, unless others hold it.

    In one transaction: a question without an answer is asked by the owner of its lease alone.
    """
    stored = lookup(conn, question_keys)
    wanted = [question for question in dict.fromkeys(question_keys) if question not in stored or question in again]
    if not wanted:
        return Claimed(stored, [])
    heartbeat(conn, owner.handle, owner.lease_s)
    reap(conn)
    lease = (owner.handle, owner.call)
    conn.executemany("INSERT OR IGNORE INTO leases VALUES (?, ?, ?)", [(question, *lease) for question in wanted])
    held = conn.execute("SELECT question FROM leases WHERE handle = ? AND call = ?", lease)
    mine = {question for (question,) in held}
    return Claimed(stored, [question for question in wanted if question in mine])


def release(conn: Connection, owner: Owner) -> None:
    """Ends all leases of `owner`."""
    conn.execute("DELETE FROM leases WHERE handle = ? AND call = ?", (owner.handle, owner.call))


def begin(
    conn: Connection,
    *,
    request_key: str,
    host: str,
    model: str,
    label: str,
    question_keys: Sequence[str],
    reserve_usd: float | None,
    budget_usd: float | None,
    owner: Owner,
) -> int | str:
    """Admits an attempt: checks the budget and records the attempt at its reserve, in one transaction.

    `label` is what the request is for, such as an annotator's name; `reserve_usd` the most it can cost, None if it has
    no price; `budget_usd` the most that all attempts of this ledger together may count, None for no limit.

    Returns:
        The attempt's id, for `succeed` or `fail`; or the raw reply to this request, if one is stored: its questions are
        linked to it, and there is nothing to send.

    Raises:
        BudgetExceededError: It could exceed the budget.
        PriceError: There is a budget, but no price.
    """
    stored = _stored_reply(conn, request_key)
    if stored is not None:
        _link(conn, request_key, question_keys)
        return stored
    reserve = nanodollars(reserve_usd)
    if budget_usd is not None:
        _check_budget(conn, model, reserve, budget_usd)
    heartbeat(conn, owner.handle, owner.lease_s)
    cursor = conn.execute(
        """INSERT INTO attempts (request_key, host, model, label, num_questions, handle, state, reserve, started_at)
        VALUES (?, ?, ?, ?, ?, ?, 'running', ?, ?)""",
        (request_key, host, model, label, len(question_keys) or 1, owner.handle, reserve, _now()),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def succeed(
    conn: Connection,
    attempt_id: int,
    *,
    raw: str,
    cost_usd: float | None,
    prompt_tokens: int | None,
    completion_tokens: int | None,
    question_keys: Sequence[str],
) -> str:
    """Stores an attempt's answer (the whole body `raw`) and links its questions to it, in the request's order.

    `cost_usd=None` leaves the reserve counted. Returns the raw reply that stands: this one, or the one stored for the
    same request before. Raises LedgerError if there is no such attempt, or it has ended already.
    """
    tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    request_key = _end(conn, attempt_id, state="answered", cost=nanodollars(cost_usd), error=None, **tokens)
    conn.execute(
        "INSERT INTO replies VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
        (request_key, raw, _digest(request_key, raw), _now()),
    )
    _link(conn, request_key, question_keys)
    stands = _stored_reply(conn, request_key)
    assert stands is not None
    return stands


def fail(
    conn: Connection,
    attempt_id: int,
    *,
    error: str,
    status: int | None,
    state: Literal["failed", "unknown"],
    cost_usd: float | None,
) -> None:
    """Ends an attempt without an answer; `state` "unknown" may have been billed, "failed" was not.

    `cost_usd` is what it cost all the same, if known; an unknown one without counts its reserve. Raises LedgerError as
    `succeed` does.
    """
    text = error.encode("utf-8", "replace").decode()[:MAX_ERROR_CHARS]
    _end(conn, attempt_id, state=state, cost=nanodollars(cost_usd), error=text, status=status)


def timings(conn: Connection, request_keys: Sequence[str]) -> list[tuple[float, int | None, int | None]]:
    """(seconds, prompt tokens, completion tokens) of each attempt at these requests that was answered."""
    days = "julianday(ended_at) - julianday(started_at)"
    return conn.execute(
        f"""SELECT ({days}) * 86400, prompt_tokens, completion_tokens FROM attempts
        WHERE state = 'answered' AND request_key IN (SELECT value FROM json_each(?)) ORDER BY id""",  # noqa: S608
        (json.dumps(list(request_keys)),),
    ).fetchall()


def spending(conn: Connection) -> pd.DataFrame:
    """Attempts and their cost by (host, model, label), sorted: the index. Sums of the columns are the whole ledger's.

    "answered", "failed", "unknown" (its process or connection ended before the answer, which may have been billed) and
    "running" count attempts; "usd" is all that counts towards a budget, of which "reserved_usd" is of unknown and
    running ones; "questions" are those answered, tokens as far as reported, and "unpriced" counts attempts, failed ones
    aside, that count nothing as the model has no price.
    """
    import pandas as pd

    states = [f"sum(seen = '{state}') AS {state}" for state in ("answered", "failed", "unknown", "running")]
    tokens = [f"coalesce(sum({kind}_tokens), 0) AS {kind}_tokens" for kind in ("prompt", "completion")]
    query = f"""SELECT host, model, label, {", ".join(states)},
            sum(iif(seen = 'answered', num_questions, 0)) AS questions, {", ".join(tokens)},
            sum(cost IS NULL AND reserve IS NULL AND state <> 'failed') AS unpriced,
            total(counted) / {NANO} AS usd,
            total(iif(seen IN ('unknown', 'running'), counted, 0)) / {NANO} AS reserved_usd
        FROM (
            SELECT *, iif(state = 'running' AND handle NOT IN ({_ALIVE}), 'unknown', state) AS seen FROM attempts
        ) GROUP BY host, model, label ORDER BY host, model, label"""  # noqa: S608 -- our own query
    cursor = conn.execute(query, {"now": time.monotonic()})  # pandas' own reading would roll back what others wait for
    columns = [name for name, *_ in cursor.description]
    return pd.DataFrame(cursor.fetchall(), columns=columns).set_index(["host", "model", "label"])


def heartbeat(conn: Connection, handle: str, lease_s: float) -> None:
    """Says that the handle is alive."""
    conn.execute("INSERT OR REPLACE INTO owners VALUES (?, ?, ?)", (handle, time.monotonic(), lease_s))


def reap(conn: Connection, handle: str | None = None) -> None:
    """Ends what dead owners have left, or what `handle` leaves: leases go, running attempts become unknown."""
    conn.execute("DELETE FROM owners WHERE handle = ?", (handle,))
    now = {"now": time.monotonic(), "ended": _now()}
    conn.execute(f"DELETE FROM leases WHERE handle NOT IN ({_ALIVE})", now)  # noqa: S608 -- our own query
    conn.execute(
        f"""UPDATE attempts SET state = 'unknown', ended_at = :ended, error = 'its process ended before the answer'
        WHERE state = 'running' AND handle NOT IN ({_ALIVE})""",  # noqa: S608 -- our own query
        now,
    )
    conn.execute(f"DELETE FROM owners WHERE handle NOT IN ({_ALIVE})", now)  # noqa: S608 -- our own query


READS = (lookup, spending)
"""Operations that write nothing."""
_ALIVE = "SELECT handle FROM owners WHERE beat <= :now AND :now < beat + lease_s"
"""Owners that have beaten of late."""


def check_budget(budget_usd: object) -> None:
    """Raise ValueError unless a budget is None (no limit) or a number of dollars in [0, `MAX_USD`]."""
    if budget_usd is not None and not (type(budget_usd) in (int, float) and 0 <= budget_usd <= MAX_USD):  # type: ignore[operator]
        raise ValueError(
            f"budget_usd: expected US dollars from 0 to {MAX_USD:,}, or None for no limit; got {budget_usd!r}."
        )


def nanodollars(usd: float | None) -> int | None:
    """Dollars, rounded up to whole nanodollars; None stays None. ValueError if not in [0, `MAX_USD`]."""
    if usd is None:
        return None
    if not 0 <= usd <= MAX_USD:
        raise ValueError(f"expected dollars in [0, {MAX_USD:.0e}], got {usd!r}")
    # The slack removes what binary fractions add: 0.1 dollars are 10**8 nanodollars, not one more.
    return math.ceil(usd * NANO * (1 - 1e-15))


def _check_budget(conn: Connection, model: str, reserve: int | None, budget_usd: float) -> None:
    if reserve is None:
        raise PriceError(
            f"There is a budget of ${budget_usd:.2f}, but no price of {model!r} is known, so nothing was sent. Give "
            "its price (USD per million input and output tokens), or run without a budget."
        )
    check_budget(budget_usd)
    counted = conn.execute("SELECT counted FROM totals").fetchone()[0]
    if counted + reserve > math.floor(budget_usd * NANO * (1 + 1e-15)):
        running = conn.execute("SELECT coalesce(sum(counted), 0) FROM attempts WHERE state = 'running'").fetchone()[0]
        raise BudgetExceededError(
            f"The budget of ${budget_usd:.4f} could be passed: ${(counted - running) / NANO:.4f} are spent in this "
            f"ledger, ${running / NANO:.4f} reserved for requests in flight, and one more to {model!r} could cost "
            f"${reserve / NANO:.4f}. Give a higher budget, or fewer in flight (max_concurrency, --max-concurrency)."
        )


def _stored_reply(conn: Connection, request_key: str) -> str | None:
    row = conn.execute("SELECT raw, sha256 FROM replies WHERE request_key = ?", (request_key,)).fetchone()
    return None if row is None else _checked(request_key, *row)


def _link(conn: Connection, request_key: str, question_keys: Sequence[str]) -> None:
    """Links questions to a stored reply.

    A question that has a link keeps it, as somebody may have used that answer; except that a request with the question
    alone replaces it and counts as one more try: so a question whose reply had no verdict is asked again.
    """
    size = len(question_keys)
    for position, question in enumerate(question_keys):
        row = conn.execute("SELECT tries, request_key FROM links WHERE question = ?", (question,)).fetchone()
        before, linked = row or (0, None)
        if row and (size > 1 or linked == request_key):
            continue
        values = (question, request_key, position, size, before + (size == 1))
        conn.execute("INSERT OR REPLACE INTO links VALUES (?, ?, ?, ?, ?, ?)", (*values, _digest(*values)))


def _end(conn: Connection, attempt_id: int, **columns: str | int | None) -> str:
    """Ends an attempt and returns its request's key. One taken for dead (unknown) may still end."""
    names = ", ".join(f"{name} = ?" for name in columns)
    row = conn.execute(
        f"""UPDATE attempts SET {names}, ended_at = ? WHERE id = ? AND state IN ('running', 'unknown')
        RETURNING request_key""",  # noqa: S608 -- names of this module's own
        (*columns.values(), _now(), attempt_id),
    ).fetchall()
    if not row:
        raise LedgerError(f"Attempt {attempt_id} is not running: it has ended, or never began. Each ends once.")
    return str(row[0][0])


def _checked(request_key: str, raw: Any, digest: Any) -> str:
    if not isinstance(raw, str) or digest != _digest(request_key, raw):
        raise LedgerError(_damaged("the reply", request_key))
    return raw


def _damaged(what: str, key: str) -> str:
    return (
        f"The ledger is damaged: {what} of {key} does not match its checksum, so it is not used. The file was not "
        "changed. Restore a copy of it, or move it away and start a new one (its answers would be paid again)."
    )


def _digest(*parts: str | int) -> str:
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
