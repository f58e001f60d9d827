"""Claims, wake-ups and workers of the SQLite store. All functions use the writer's connection.

A claim looks for due runs before it takes the write lock, so that idle workers do not block busy ones. It does not wait
for the disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import apsw
import msgspec
from msgspec.structs import replace

from perdure.model.records import WorkerRecord
from perdure.stores import semantics as rules
from perdure.stores import sql_rows
from perdure.stores.protocol import Claim
from perdure.stores.results import ClaimedRun
from perdure.stores.sqlite.statements import RELEASE, WORKER_IS_LIVE

FEW = 20
"""Due runs, or workflows, up to which the caller's thread claims. 20 runs take 0.3 ms, which blocks the event loop."""
_NORMAL = 1  # `PRAGMA synchronous = normal`: only checkpoints wait for the disk

DUE = """
    SELECT wake_at, id, pk FROM runs
    WHERE pool = ? AND gate = ? AND workflow = ? AND version = ? AND wake_at <= ? AND owner IS NULL AND ended_at IS NULL
    ORDER BY wake_at, id LIMIT ?"""
DUE_IN_SHARDS = DUE.replace("ORDER BY", "AND shard IN (SELECT value FROM json_each(?)) ORDER BY")
CLAIM = """
    UPDATE runs SET owner = ?, status = 'running', wake_at = NULL, has_new_messages = 0,
           first_executed_at = coalesce(first_executed_at, ?), updated_at = ?
    WHERE pk = ?
    RETURNING id, last_message_no,
        max(fence, coalesce((SELECT max(position) FROM entries WHERE run_pk = runs.pk), 0))"""
NEXT_VERSION = """
    SELECT workflow, version, wake_at FROM runs
    WHERE pool = ? AND gate = ? AND workflow = ? AND version > ?
          AND owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL
    ORDER BY version, wake_at LIMIT 1"""
NEXT_WORKFLOW = """
    SELECT workflow, version, wake_at FROM runs
    WHERE pool = ? AND gate = ? AND workflow > ? AND owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL
    ORDER BY workflow, version, wake_at LIMIT 1"""
NEXT_GATE = """
    SELECT gate FROM runs
    WHERE pool = ? AND gate > ? AND owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL
    ORDER BY gate LIMIT 1"""
OWNED_WITH_MESSAGES = "SELECT id FROM runs WHERE owner = ? AND has_new_messages = 1 ORDER BY id LIMIT ?"
RETRY_HELD = """
    UPDATE runs SET wake_at = ?
    WHERE workflow = ? AND version = ? AND held IS NOT NULL AND owner IS NULL AND waiting = 0
          AND CASE WHEN json_valid(held) THEN json_extract(held, '$.kind') = ? END
          AND ended_at IS NULL AND (wake_at IS NULL OR wake_at > ?)
    RETURNING id"""
OWNED = "SELECT id, pk, first_executed_at IS NOT NULL OR generation > 0 FROM runs WHERE owner = ? LIMIT ?"
COUNT_RECOVERY = "UPDATE runs SET recoveries = recoveries + 1 WHERE pk = ?"
JOIN = """
    INSERT INTO workers (id, pool, workflows, lease_until, started_at, host, pid) VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO NOTHING RETURNING 1"""
RENEW = """
    UPDATE workers SET pool = ?2, workflows = ?3, lease_until = ?4, started_at = ?5, host = ?6, pid = ?7
    WHERE id = ?1 AND fenced = 0 RETURNING 1"""
FENCE_WORKER = """
    UPDATE workers SET fenced = 1 WHERE id = ?1 AND (fenced = 1 OR ?2 IS NULL OR lease_until <= ?2) RETURNING 1"""


@contextmanager
def writing(connection: apsw.Connection) -> Iterator[None]:
    """Execute the block in one write transaction. After an error the connection thread rolls it back."""
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.execute("COMMIT")


@contextmanager
def without_sync(connection: apsw.Connection) -> Iterator[None]:
    """Do not wait for the disk in the commits of the block. They survive a crash of the process, not of the machine.

    The next commit that waits makes them durable too: the disk gets the log in order.
    """
    level = connection.pragma("synchronous")
    if level <= _NORMAL:
        yield
        return
    connection.pragma("synchronous", _NORMAL)
    try:
        yield
    finally:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")  # the level cannot be changed in a transaction
            connection.pragma("synchronous", level)
        except apsw.Error:
            connection.close(force=True)  # it must not be used with this level: the thread opens another one
            raise


# --- claims and wake-ups -------------------------------------------------------------------------------------------


def claim(connection: apsw.Connection, claim: Claim) -> list[ClaimedRun]:
    """Make the worker the owner of the earliest due runs and return them. A fenced worker gets none.

    If the machine crashes, the worker is dead, and a claim that is lost leaves the run due. A turn of the run waits for
    the disk, and the claim is durable with it.
    """
    if not _due(connection, claim):
        return []
    with without_sync(connection), writing(connection):
        if connection.execute(WORKER_IS_LIVE, (claim.worker,)).get is None:
            return []
        claims = [(claim.worker, claim.now, claim.now, pk) for _, _, pk in _due(connection, claim)]
        return [ClaimedRun(*claimed) for claimed in connection.executemany(CLAIM, claims)]


def claim_if_few(connection: apsw.Connection, wanted: Claim) -> list[ClaimedRun] | None:
    """Claim runs if only a few are due, in all shards. Otherwise return None: then a claim may take long."""
    if len(wanted.workflows) > FEW:
        return None
    everywhere = replace(wanted, shards=None, limit=min(wanted.limit, FEW) + 1)
    due = _due(connection, everywhere)
    if len(due) > FEW:
        return None
    return claim(connection, wanted) if due else []


def _due(connection: apsw.Connection, claim: Claim) -> list[tuple[float, str, int]]:
    """Return (wake_at, id, pk) of the earliest due runs.

    The index has the runs of one gate, workflow and version in order of `wake_at`. The first runs of each are merged.
    """
    found: list[tuple[float, str, int]] = []
    for gate, limit in {"": claim.limit, **dict(claim.gates)}.items():
        found += _due_of_gate(connection, claim, gate, limit)
    return sorted(found)[: claim.limit]


def _due_of_gate(connection: apsw.Connection, claim: Claim, gate: str, limit: int) -> list[tuple[float, str, int]]:
    """Return the earliest due runs with this gate. The shards apply only to runs without one."""
    found: list[tuple[float, str, int]] = []
    due_by = claim.now if claim.due_by is None else claim.due_by
    for workflow, version in set(claim.workflows):
        where = (claim.pool, gate, workflow, version, due_by)
        if claim.shards is None or gate:
            found += connection.execute(DUE, (*where, limit))
        else:
            shards = msgspec.json.encode(sorted(claim.shards)).decode()
            found += connection.execute(DUE_IN_SHARDS, (*where, shards, limit))
    return sorted(found)[:limit]


def next_wake(connection: apsw.Connection, pool: str, gates: Sequence[str] | None) -> float | None:
    """Return the earliest `wake_at` of the pool's runs without an owner, behind one of the gates, or None.

    The search skips along the index from one gate, workflow and version to the next. Its cost does not depend on the
    number of runs.
    """
    counted = _all_gates(connection, pool) if gates is None else {"", *gates}
    return min((at for gate in counted for at in _wakes_of_gate(connection, pool, gate)), default=None)


def _all_gates(connection: apsw.Connection, pool: str) -> Iterator[str]:
    gate: str | None = ""
    while gate is not None:
        yield gate
        gate = connection.execute(NEXT_GATE, (pool, gate)).get


def _wakes_of_gate(connection: apsw.Connection, pool: str, gate: str) -> Iterator[float]:
    """Yield the earliest `wake_at` of each workflow and version of the runs with this gate."""
    row: Any = connection.execute(NEXT_WORKFLOW, (pool, gate, "")).fetchone()
    while row is not None:
        workflow, version, wake_at = row
        yield wake_at
        row = connection.execute(NEXT_VERSION, (pool, gate, workflow, version)).fetchone()
        if row is None:
            row = connection.execute(NEXT_WORKFLOW, (pool, gate, workflow)).fetchone()


def owned(connection: apsw.Connection, worker: str) -> list[str]:
    return sorted(id for (id,) in connection.execute("SELECT id FROM runs WHERE owner = ?", (worker,)))


def owned_with_messages(connection: apsw.Connection, worker: str, limit: int) -> list[str]:
    return [id for (id,) in connection.execute(OWNED_WITH_MESSAGES, (worker, limit))]


def retry_held(
    connection: apsw.Connection, workflows: Sequence[tuple[str, int]], kind: str, now: float
) -> frozenset[str]:
    """Make the held runs of these workflows and this kind of hold due. Return their ids."""
    woken: set[str] = set()
    with writing(connection):
        for workflow, version in workflows:
            woken.update(id for (id,) in connection.execute(RETRY_HELD, (now, workflow, version, kind, now)))
    return frozenset(woken)


# --- workers -------------------------------------------------------------------------------------------------------


def join(connection: apsw.Connection, worker: WorkerRecord) -> bool:
    with writing(connection):
        return connection.execute(JOIN, sql_rows.worker_row(worker)).get is not None


def renew(connection: apsw.Connection, worker: WorkerRecord) -> bool:
    with writing(connection):
        return connection.execute(RENEW, sql_rows.worker_row(worker)).get is not None


def fence_worker(connection: apsw.Connection, worker_id: str, unless_renewed_after: float | None) -> bool:
    """Fence the worker unless its lease was renewed beyond the given time. Return whether it is fenced."""
    with writing(connection):
        return connection.execute(FENCE_WORKER, (worker_id, unless_renewed_after)).get is not None


def release_runs(connection: apsw.Connection, worker_id: str, now: float, recovered: bool, limit: int) -> list[str]:
    """Release a page of the worker's runs and return their ids. `recovered` counts a recovery for each of them."""
    with writing(connection):
        owned: list[tuple[str, int, bool]] = [*connection.execute(OWNED, (worker_id, limit))]
        connection.executemany(RELEASE, [(rules.status_released(started), now, now, pk) for _, pk, started in owned])
        if recovered:
            connection.executemany(COUNT_RECOVERY, [(pk,) for _, pk, _ in owned])
    return [id for id, _, _ in owned]


def remove_worker(connection: apsw.Connection, worker_id: str) -> None:
    """Delete the worker's row. A worker that still owns runs is fenced instead, so that a takeover finds its runs."""
    with writing(connection):
        if connection.execute(OWNED, (worker_id, 1)).get is None:
            connection.execute("DELETE FROM workers WHERE id = ?", (worker_id,))
        else:
            connection.execute("UPDATE workers SET fenced = 1 WHERE id = ?", (worker_id,))
