"""Claims, wake-ups, workers, signing keys and pruning of the PostgreSQL store.

Statements that change several rows lock them in order of their ids, as commits do. So they cannot deadlock.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from perdure.model.records import SigningKey, WorkerRecord
from perdure.stores import sql_rows as rows
from perdure.stores.postgres.pool import ConnectionPool, sql
from perdure.stores.protocol import Claim
from perdure.stores.results import RETAINED_REASONS, ClaimedRun, Committed, RunMissing, RunRetained

CLAIM = "SELECT * FROM {schema}.claim_runs($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
# Walks the index from one (gate, workflow, version) to the next: the cost depends on their number, not on that of runs.
NEXT_WAKE = """
    WITH RECURSIVE groups AS (
        (SELECT r.gate, r.workflow, r.version, r.wake_at FROM {schema}.runs r
         WHERE r.pool = $1 AND r.owner IS NULL AND r.wake_at IS NOT NULL AND r.ended_at IS NULL
         ORDER BY r.gate, r.workflow, r.version, r.wake_at LIMIT 1)
        UNION ALL
        SELECT following.* FROM groups g CROSS JOIN LATERAL (
            SELECT r.gate, r.workflow, r.version, r.wake_at FROM {schema}.runs r
            WHERE r.pool = $1 AND (r.gate, r.workflow, r.version) > (g.gate, g.workflow, g.version) AND r.owner IS NULL
                  AND r.wake_at IS NOT NULL AND r.ended_at IS NULL
            ORDER BY r.gate, r.workflow, r.version, r.wake_at LIMIT 1
        ) AS following
    )
    SELECT min(wake_at) FROM groups WHERE $2::text[] IS NULL OR gate = '' OR gate = ANY ($2)"""
OWNED = "SELECT r.id FROM {schema}.runs r WHERE r.owner = $1 ORDER BY r.id"
OWNED_WITH_MESSAGES = (
    "SELECT r.id FROM {schema}.runs r WHERE r.owner = $1 AND r.has_new_messages ORDER BY r.id LIMIT $2"
)
RETRY_HELD = """
    WITH held AS (
        SELECT r.pk FROM {schema}.runs r
        JOIN (SELECT DISTINCT * FROM unnest($1::text[], $2::bigint[])) AS w (workflow, version)
             ON r.workflow = w.workflow AND r.version = w.version
        WHERE r.held_kind = $3 AND r.owner IS NULL AND r.ended_at IS NULL AND (r.wake_at IS NULL OR r.wake_at > $4)
        ORDER BY r.id FOR NO KEY UPDATE OF r
    )
    UPDATE {schema}.runs r SET wake_at = $4 FROM held WHERE r.pk = held.pk RETURNING r.id"""
JOIN = """
    INSERT INTO {schema}.workers (id, pool, workflows, lease_until, started_at, host, pid)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
    ON CONFLICT (id) DO NOTHING RETURNING true"""
RENEW = """
    UPDATE {schema}.workers w
    SET pool = $2, workflows = $3, lease_until = $4, started_at = $5, host = $6, pid = $7
    WHERE w.id = $1 AND NOT w.fenced RETURNING true"""
FENCE_WORKER = """
    UPDATE {schema}.workers w SET fenced = true
    WHERE w.id = $1 AND (w.fenced OR $2::float8 IS NULL OR w.lease_until <= $2) RETURNING true"""
RELEASE_RUNS = """
    WITH page AS (
        SELECT r.pk FROM {schema}.runs r WHERE r.owner = $1 ORDER BY r.id LIMIT $4 FOR NO KEY UPDATE
    )
    UPDATE {schema}.runs r
    SET owner = NULL, has_new_messages = false, status = {schema}.status_released(r), wake_at = $2, updated_at = $2,
        recoveries = r.recoveries + $3
    FROM page WHERE r.pk = page.pk RETURNING r.id"""
REMOVE_WORKER = "SELECT {schema}.remove_worker($1)"
PRUNE = "SELECT {schema}.prune_runs($1, $2, $3)"
_TABLES_OF_RUN = ("entries", "inbox", "observers", "published", "stream_items", "subscriptions", "run_tags")
_DELETED = ", ".join(
    f"{table}_deleted AS (DELETE FROM {{schema}}.{table} x USING deleted d WHERE x.run_pk = d.pk)"
    for table in _TABLES_OF_RUN
)
# The lock on the row comes first: a rewind or a finalization of the run is either seen or waits.
DELETE_RUN = f"""
    WITH found AS (
        SELECT r.pk, r.ended_at IS NULL AS is_open, r.unfinalized,
               EXISTS (SELECT FROM {{schema}}.runs above WHERE above.id = r.parent AND above.ended_at IS NULL)
               AS has_open_parent
        FROM {{schema}}.runs r WHERE r.id = $1 FOR UPDATE OF r
    ), deleted AS (
        DELETE FROM {{schema}}.runs r USING found f
        WHERE r.pk = f.pk AND NOT f.is_open AND NOT f.unfinalized AND NOT f.has_open_parent
        RETURNING r.pk
    ), {_DELETED}
    SELECT is_open, unfinalized, has_open_parent FROM found"""
SIGNING_KEYS = (
    "SELECT k.number, k.created_at, k.secret FROM {schema}.signing_keys_of($1, $2, $3) AS k ORDER BY k.number"
)
ADD_SIGNING_KEY = """
    INSERT INTO {schema}.signing_keys (name, number, created_at, secret)
    SELECT $1, coalesce(max(k.number), 0) + 1, $2, $3 FROM {schema}.signing_keys k WHERE k.name = $1
    ON CONFLICT DO NOTHING
    RETURNING number, created_at, secret"""
REMOVE_DEAD_LETTER = "DELETE FROM {schema}.dead_letters d WHERE d.id = $1 RETURNING true"
NOW = "SELECT extract(epoch FROM clock_timestamp())::float8"


async def now(pool: ConnectionPool) -> float:
    time: float = await pool.value(NOW)
    return time


# --- claims and wake-ups --------------------------------------------------------------------------------------------


async def claim(pool: ConnectionPool, claim: Claim) -> list[ClaimedRun]:
    names = [name for name, _ in claim.workflows]
    versions = [version for _, version in claim.workflows]
    shards = None if claim.shards is None else sorted(claim.shards)
    due_by = claim.now if claim.due_by is None else claim.due_by
    gates = dict(claim.gates)
    ungated = min(gates.pop("", claim.limit), claim.limit)
    limits = (claim.limit, ungated, list(gates), [min(free, claim.limit) for free in gates.values()])
    claimed = await pool.fetch(
        sql(CLAIM, pool.target), claim.worker, claim.now, due_by, claim.pool, names, versions, shards, *limits
    )
    return [ClaimedRun(*row) for row in claimed]


async def next_wake(pool: ConnectionPool, worker_pool: str, gates: Sequence[str] | None) -> float | None:
    named = None if gates is None else list(gates)
    earliest: float | None = await pool.value(sql(NEXT_WAKE, pool.target), worker_pool, named)
    return earliest


async def owned(pool: ConnectionPool, worker: str) -> list[str]:
    return [row[0] for row in await pool.fetch(sql(OWNED, pool.target), worker)]


async def owned_with_messages(pool: ConnectionPool, worker: str, limit: int) -> list[str]:
    return [row[0] for row in await pool.fetch(sql(OWNED_WITH_MESSAGES, pool.target), worker, limit)]


async def retry_held(
    pool: ConnectionPool, workflows: Sequence[tuple[str, int]], kind: str, now: float
) -> frozenset[str]:
    names, versions = [name for name, _ in workflows], [version for _, version in workflows]
    return frozenset(row[0] for row in await pool.fetch(sql(RETRY_HELD, pool.target), names, versions, kind, now))


# --- workers --------------------------------------------------------------------------------------------------------


async def join(pool: ConnectionPool, worker: WorkerRecord) -> bool:
    return await pool.value(sql(JOIN, pool.target), *rows.worker_row(worker)) is not None


async def renew(pool: ConnectionPool, worker: WorkerRecord) -> bool:
    return await pool.value(sql(RENEW, pool.target), *rows.worker_row(worker)) is not None


async def fence_worker(pool: ConnectionPool, worker_id: str, unless_renewed_after: float | None) -> bool:
    return await pool.value(sql(FENCE_WORKER, pool.target), worker_id, unless_renewed_after) is not None


async def release_runs(pool: ConnectionPool, worker_id: str, now: float, recovered: bool, limit: int) -> list[str]:
    found = await pool.fetch(sql(RELEASE_RUNS, pool.target), worker_id, now, int(recovered), limit)
    return sorted(row[0] for row in found)


async def remove_worker(pool: ConnectionPool, worker_id: str) -> None:
    await pool.fetch(sql(REMOVE_WORKER, pool.target), worker_id)


# --- maintenance and keys -------------------------------------------------------------------------------------------


async def prune(pool: ConnectionPool, now: float, limit: int, keep_ids_for: float) -> list[str]:
    ids: list[str] = await pool.value(sql(PRUNE, pool.target), now, limit, keep_ids_for)
    return ids


async def delete_run(pool: ConnectionPool, run_id: str) -> Committed | RunMissing | RunRetained:
    found = await pool.fetch(sql(DELETE_RUN, pool.target), run_id)
    if not found:
        return RunMissing()
    reasons = (reason for reason, applies in zip(RETAINED_REASONS, found[0], strict=True) if applies)
    return next((RunRetained(reason) for reason in reasons), Committed())


async def keys(pool: ConnectionPool, name: str, now: float) -> list[SigningKey]:
    return [
        SigningKey(*row) for row in await pool.fetch(sql(SIGNING_KEYS, pool.target), name, now, secrets.token_bytes(32))
    ]


async def add_key(pool: ConnectionPool, name: str, now: float) -> SigningKey:
    while True:
        added = await pool.fetch(sql(ADD_SIGNING_KEY, pool.target), name, now, secrets.token_bytes(32))
        if added:  # otherwise a concurrent call has used the number
            return SigningKey(*added[0])


async def remove_dead_letter(pool: ConnectionPool, dead_letter_id: str) -> bool:
    return await pool.value(sql(REMOVE_DEAD_LETTER, pool.target), dead_letter_id) is not None
