"""What tests read in a ledger: its attempts, row by row."""

from sqlite3 import Connection
from typing import NamedTuple

from alpacafarm_env.llm.ledger.operations import NANO


class Attempt(NamedTuple):
    """One row of `attempts`; dollars and tokens are None where they are not known."""

    id: int
    request_key: str
    host: str
    model: str
    label: str
    num_questions: int
    state: str
    reserve_usd: float | None
    cost_usd: float | None
    prompt_tokens: int | None
    completion_tokens: int | None
    status: int | None
    error: str | None
    started_at: str
    ended_at: str | None


def attempts(conn: Connection) -> list[Attempt]:
    """All attempts, the newest first; for `Ledger.do`."""
    rows = conn.execute(
        """SELECT id, request_key, host, model, label, num_questions, state, reserve, cost, prompt_tokens,
            completion_tokens, status, error, started_at, ended_at
        FROM attempts ORDER BY id DESC"""
    )
    usd = lambda nano: None if nano is None else nano / NANO
    read = (Attempt(*row) for row in rows)
    return [row._replace(reserve_usd=usd(row.reserve_usd), cost_usd=usd(row.cost_usd)) for row in read]
