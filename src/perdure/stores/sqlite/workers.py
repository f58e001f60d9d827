"""Who executes what: claims, wake-ups and workers of the SQLite store. All of it runs on the writer's connection.

Whether anything is due is asked before the write lock is taken: idle engines do not get in the way of busy ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import apsw
import msgspec

from perdure.model.records import WorkerRecord
from perdure.stores import semantics as rules
from perdure.stores import sql_rows as rows
from perdure.stores.protocol import Claim
from perdure.stores.results import ClaimedRun
from perdure.stores.sqlite.batch import ALIVE, RELEASE

DUE = """
    SELECT wake_at, id, no FROM runs
    WHERE pool = ? AND workflow = ? AND version = ? AND wake_at <= ? AND owner IS NULL AND ended_at IS NULL
    ORDER BY wake_at, id LIMIT ?"""
DUE_IN_SHARDS = DUE.replace("ORDER BY", "AND shard IN (SELECT value FROM json_each(?)) ORDER BY")
TAKE = """
    UPDATE runs SET owner = ?, status = 'running', wake_at = NULL, mailed = 0,
        first_executed_at = coalesce(first_executed_at, ?),
           updated_at = ?
    WHERE no = ?
    RETURNING id, last_message_no,
        max(fence, coalesce((SELECT max(position) FROM entries WHERE run_no = runs.no), 0))"""
NEXT_VERSION = """
    SELECT workflow, version, wake_at FROM runs
    WHERE pool = ? AND workflow = ? AND version > ? AND owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL
    ORDER BY version, wake_at LIMIT 1"""
NEXT_WORKFLOW = """
    SELECT workflow, version, wake_at FROM runs
    WHERE pool = ? AND workflow > ? AND owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL
    ORDER BY workflow, version, wake_at LIMIT 1"""
MAILED = "SELECT id FROM runs WHERE owner = ? AND mailed = 1 ORDER BY id LIMIT ?"
WAKE_HELD = """
    UPDATE runs SET wake_at = ?
    WHERE workflow = ? AND version = ? AND held IS NOT NULL AND json_extract(held, '$.kind') = ? AND owner IS NULL
          AND ended_at IS NULL AND (wake_at IS NULL OR wake_at > ?)
    RETURNING id"""
OWNED = "SELECT id, no, first_executed_at IS NOT NULL OR generation > 0 FROM runs WHERE owner = ? LIMIT ?"
COUNT_RECOVERY = "UPDATE runs SET recoveries = recoveries + 1 WHERE no = ?"
JOIN = """
    INSERT INTO workers (id, pool, workflows, lease_until, started_at, node, pid) VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO NOTHING RETURNING 1"""
RENEW = """
    UPDATE workers SET pool = ?2, workflows = ?3, lease_until = ?4, started_at = ?5, node = ?6, pid = ?7
    WHERE id = ?1 AND gone = 0 RETURNING 1"""
DECLARE_GONE = """
    UPDATE workers SET gone = 1 WHERE id = ?1 AND (gone = 1 OR ?2 IS NULL OR lease_until <= ?2) RETURNING 1"""


@contextmanager
def writing(connection: apsw.Connection) -> Iterator[None]:
    """One transaction that nobody interleaves with. After an error the thread rolls back."""
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("COMMIT")


# --- claims and wake-ups -------------------------------------------------------------------------------------------


def claim(connection: apsw.Connection, claim: Claim) -> list[ClaimedRun]:
    if not _due(connection, claim):
        return []
    with writing(connection):
        alive = connection.execute(ALIVE, (claim.worker,)).get is not None
        taken = [(claim.worker, claim.now, claim.now, no) for _, _, no in _due(connection, claim)] if alive else []
        return [ClaimedRun(*claimed) for claimed in connection.executemany(TAKE, taken)]


def _due(connection: apsw.Connection, claim: Claim) -> list[tuple[float, str, int]]:
    """(wake_at, id, no) of the earliest due runs: the first of each pair, which the index has in order, merged."""
    found: list[tuple[float, str, int]] = []
    due_by = claim.now if claim.due_by is None else claim.due_by
    for workflow, version in set(claim.workflows):
        where = (claim.pool, workflow, version, due_by)
        if claim.shards is None:
            found += connection.execute(DUE, (*where, claim.limit))
        else:
            shards = msgspec.json.encode(sorted(claim.shards)).decode()
            found += connection.execute(DUE_IN_SHARDS, (*where, shards, claim.limit))
    return sorted(found)[: claim.limit]


def next_wake(connection: apsw.Connection, pool: str) -> float | None:
    """From pair to pair along the index: as many steps as there are workflows, however many runs wait."""
    earliest: list[float] = []
    row = connection.execute(NEXT_WORKFLOW, (pool, "")).fetchone()
    while row is not None:
        workflow, version, wake_at = row
        earliest.append(wake_at)
        row = connection.execute(NEXT_VERSION, (pool, workflow, version)).fetchone()
        if row is None:
            row = connection.execute(NEXT_WORKFLOW, (pool, workflow)).fetchone()
    return min(earliest, default=None)


def owned(connection: apsw.Connection, worker: str) -> list[str]:
    return sorted(id for (id,) in connection.execute("SELECT id FROM runs WHERE owner = ?", (worker,)))


def mailed(connection: apsw.Connection, worker: str, limit: int) -> list[str]:
    return [id for (id,) in connection.execute(MAILED, (worker, limit))]


def wake_held(
    connection: apsw.Connection, workflows: Sequence[tuple[str, int]], kind: str, now: float
) -> frozenset[str]:
    woken: set[str] = set()
    with writing(connection):
        for workflow, version in workflows:
            woken.update(id for (id,) in connection.execute(WAKE_HELD, (now, workflow, version, kind, now)))
    return frozenset(woken)


# --- workers -------------------------------------------------------------------------------------------------------


def join(connection: apsw.Connection, worker: WorkerRecord) -> bool:
    with writing(connection):
        return connection.execute(JOIN, rows.worker_row(worker)).get is not None


def renew(connection: apsw.Connection, worker: WorkerRecord) -> bool:
    with writing(connection):
        return connection.execute(RENEW, rows.worker_row(worker)).get is not None


def declare_gone(connection: apsw.Connection, worker_id: str, unless_renewed_after: float | None) -> bool:
    with writing(connection):
        return connection.execute(DECLARE_GONE, (worker_id, unless_renewed_after)).get is not None


def release(connection: apsw.Connection, worker_id: str, now: float, recovered: bool, limit: int) -> list[str]:
    with writing(connection):
        owned: list[tuple[str, int, bool]] = [*connection.execute(OWNED, (worker_id, limit))]
        connection.executemany(RELEASE, [(rules.status_released(begun), now, now, no) for _, no, begun in owned])
        if recovered:
            connection.executemany(COUNT_RECOVERY, [(no,) for _, no, _ in owned])
    return [id for id, _, _ in owned]


def retire(connection: apsw.Connection, worker_id: str) -> None:
    """Forget the worker; one that still owns runs is declared gone instead, or its runs would be lost."""
    with writing(connection):
        if connection.execute(OWNED, (worker_id, 1)).get is None:
            connection.execute("DELETE FROM workers WHERE id = ?", (worker_id,))
        else:
            connection.execute("UPDATE workers SET gone = 1 WHERE id = ?", (worker_id,))
