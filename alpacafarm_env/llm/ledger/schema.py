"""The ledger's tables, and the rows and sums it hands out.

Tables:

    replies   one raw reply per request, with its SHA-256; the first that arrives stands
    links     which reply answers which question, at which position of how many
    attempts  every request that was sent or may have been: state, reserve, cost. Never deleted
    totals    the sum of what all attempts count, kept by triggers, so that a budget is checked in constant time
    owners    who is alive: a process beats while it holds leases or has attempts running
    leases    which question is being asked right now, and by whom

Money is kept in whole nanodollars: sums of integers do not depend on their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

APPLICATION_ID = 0x414C5046
"""Marks the file as a ledger, in SQLite's header ("ALPF")."""
SCHEMA_VERSION = 1

SCHEMA = (
    """CREATE TABLE replies (
    request_key TEXT PRIMARY KEY NOT NULL, raw TEXT NOT NULL, sha256 TEXT NOT NULL, stored_at TEXT NOT NULL
) STRICT""",
    """CREATE TABLE links (
    question TEXT PRIMARY KEY NOT NULL, request_key TEXT NOT NULL REFERENCES replies, position INTEGER NOT NULL,
    size INTEGER NOT NULL, tries INTEGER NOT NULL, sha256 TEXT NOT NULL
) STRICT, WITHOUT ROWID""",
    # An attempt counts its cost; without one nothing if it failed, else its reserve.
    """CREATE TABLE attempts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, request_key TEXT NOT NULL, host TEXT NOT NULL, model TEXT NOT NULL,
    label TEXT NOT NULL, num_questions INTEGER NOT NULL, handle TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'answered', 'failed', 'unknown')),
    reserve INTEGER CHECK (reserve >= 0), cost INTEGER CHECK (cost >= 0),
    prompt_tokens INTEGER, completion_tokens INTEGER, status INTEGER, error TEXT,
    started_at TEXT NOT NULL, ended_at TEXT,
    counted INTEGER NOT NULL AS (coalesce(cost, iif(state = 'failed', 0, reserve), 0)) STORED
) STRICT""",
    "CREATE INDEX attempts_running ON attempts (handle) WHERE state = 'running'",
    "CREATE TABLE totals (counted INTEGER NOT NULL) STRICT",
    """CREATE TRIGGER attempts_added AFTER INSERT ON attempts BEGIN
    UPDATE totals SET counted = counted + NEW.counted;
END""",
    """CREATE TRIGGER attempts_changed AFTER UPDATE ON attempts BEGIN
    UPDATE totals SET counted = counted + NEW.counted - OLD.counted;
END""",
    "CREATE TABLE owners (handle TEXT PRIMARY KEY NOT NULL, beat REAL NOT NULL, lease_s REAL NOT NULL) STRICT",
    """CREATE TABLE leases (
    question TEXT PRIMARY KEY NOT NULL, handle TEXT NOT NULL, call INTEGER NOT NULL
) STRICT, WITHOUT ROWID""",
    "CREATE INDEX leases_handle ON leases (handle)",
)


@dataclass(frozen=True)
class Owner:
    """One call's name as a claimant: calls of one process, even of one handle, are different claimants.

    Attributes:
        handle: The open ledger; its writer thread beats for it.
        call: Number of the call.
        lease_s: Seconds after which a handle that no longer beats is dead.
    """

    handle: str
    call: int
    lease_s: float


class Stored(NamedTuple):
    """A stored answer to a question.

    Attributes:
        raw: The whole body of the reply as it came.
        request_key: The request it replied to.
        position: The question's index in that request, 0 ... size - 1.
        size: Questions in that request.
        tries: How often the question was answered alone (in requests of size 1).
    """

    raw: str
    request_key: str
    position: int
    size: int
    tries: int


@dataclass(frozen=True)
class AttemptTotals:
    """Counts and dollars of a set of attempts.

    Attributes:
        answered, failed, unknown, running: Attempts in each state. Unknown: may have been billed, the answer was lost.
        answered_usd, failed_usd, unknown_usd, running_usd: What they count; unknown and running ones their reserve.
        questions: Questions in the answered attempts.
        prompt_tokens, completion_tokens: As the server reported them, over the attempts where it did.
        unpriced: Attempts, failed ones aside, that count nothing because the model has no price.
    """

    answered: int = 0
    failed: int = 0
    unknown: int = 0
    running: int = 0
    answered_usd: float = 0.0
    failed_usd: float = 0.0
    unknown_usd: float = 0.0
    running_usd: float = 0.0
    questions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unpriced: int = 0

    @property
    def attempts(self) -> int:
        """All attempts."""
        return self.answered + self.failed + self.unknown + self.running

    @property
    def usd(self) -> float:
        """All that counts towards a budget, reserves included."""
        return self.answered_usd + self.failed_usd + self.unknown_usd + self.running_usd


@dataclass(frozen=True)
class Spending:
    """What was asked and paid: `total`, and `groups` by (host, model, label), sorted."""

    total: AttemptTotals
    groups: dict[tuple[str, str, str], AttemptTotals]
