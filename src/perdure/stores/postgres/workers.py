"""Who executes what: claims, wake-ups and workers of the PostgreSQL store; keys and upkeep.

Where several rows are changed they are locked in order of their ids, as everywhere, so that nobody waits in a circle.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from perdure.model.records import SigningKey, WorkerRecord
from perdure.stores import sql_rows as rows
from perdure.stores.postgres.pool import ConnectionPool, sql
from perdure.stores.protocol import Claim
from perdure.stores.results import ClaimedRun

CLAIM = "SELECT * FROM {schema}.claim_due($1, $2, $3, $4, $5, $6, $7, $8)"
# From pair to pair along the index: as many steps as there are workflows, however many runs wait.
NEXT_WAKE = """
    WITH RECURSIVE pairs AS (
        (SELECT r.workflow, r.version, r.wake_at FROM {schema}.runs r
         WHERE r.pool = $1 AND r.owner IS NULL AND r.wake_at IS NOT NULL AND r.ended_at IS NULL
         ORDER BY r.workflow, r.version, r.wake_at LIMIT 1)
        UNION ALL
        SELECT following.* FROM pairs p CROSS JOIN LATERAL (
            SELECT r.workflow, r.version, r.wake_at FROM {schema}.runs r
            WHERE r.pool = $1 AND (r.workflow, r.version) > (p.workflow, p.version) AND r.owner IS NULL
                  AND r.wake_at IS NOT NULL AND r.ended_at IS NULL
            ORDER BY r.workflow, r.version, r.wake_at LIMIT 1
        ) AS following
    )
    SELECT min(wake_at) FROM pairs"""
OWNED = "SELECT r.id FROM {schema}.runs r WHERE r.owner = $1 ORDER BY r.id"
MAILED = "SELECT r.id FROM {schema}.runs r WHERE r.owner = $1 AND r.mailed ORDER BY r.id LIMIT $2"
WAKE_HELD = """
    WITH held AS (
        SELECT r.no FROM {schema}.runs r
        JOIN (SELECT DISTINCT * FROM unnest($1::text[], $2::bigint[])) AS w (workflow, version)
             ON r.workflow = w.workflow AND r.version = w.version
        WHERE r.held_kind = $3 AND r.owner IS NULL AND r.ended_at IS NULL AND (r.wake_at IS NULL OR r.wake_at > $4)
        ORDER BY r.id FOR NO KEY UPDATE OF r
    )
    UPDATE {schema}.runs r SET wake_at = $4 FROM held WHERE r.no = held.no RETURNING r.id"""
JOIN = """
    INSERT INTO {schema}.workers (id, pool, workflows, lease_until, started_at, node, pid)
    VALUES ($1, $2, $3, $4, $5, $6, $7)
    ON CONFLICT (id) DO NOTHING RETURNING true"""
RENEW = """
    UPDATE {schema}.workers w
    SET pool = $2, workflows = $3, lease_until = $4, started_at = $5, node = $6, pid = $7
    WHERE w.id = $1 AND NOT w.gone RETURNING true"""
DECLARE_GONE = """
    UPDATE {schema}.workers w SET gone = true
    WHERE w.id = $1 AND (w.gone OR $2::float8 IS NULL OR w.lease_until <= $2) RETURNING true"""
RELEASE = """
    WITH page AS (
        SELECT r.no FROM {schema}.runs r WHERE r.owner = $1 ORDER BY r.id LIMIT $4 FOR NO KEY UPDATE
    )
    UPDATE {schema}.runs r
    SET owner = NULL, mailed = false, status = {schema}.status_released(r), wake_at = $2, updated_at = $2,
        recoveries = r.recoveries + $3
    FROM page WHERE r.no = page.no RETURNING r.id"""
RETIRE = "SELECT {schema}.retire_worker($1)"
PRUNE = "SELECT {schema}.prune_page($1, $2, $3)"
KEYS = "SELECT k.number, k.made_at, k.secret FROM {schema}.keys_of($1, $2, $3) AS k ORDER BY k.number"
ADD_KEY = """
    INSERT INTO {schema}.keys (name, number, made_at, secret)
    SELECT $1, coalesce(max(k.number), 0) + 1, $2, $3 FROM {schema}.keys k WHERE k.name = $1
    ON CONFLICT DO NOTHING
    RETURNING number, made_at, secret"""
REMOVE_LETTER = "DELETE FROM {schema}.dead_letters d WHERE d.id = $1 RETURNING true"
NOW = "SELECT extract(epoch FROM clock_timestamp())::float8"


async def now(link: ConnectionPool) -> float:
    moment: float = await link.value(NOW)
    return moment


# --- claims and wake-ups -------------------------------------------------------------------------------------------


async def claim(link: ConnectionPool, claim: Claim) -> list[ClaimedRun]:
    names = [name for name, _ in claim.workflows]
    versions = [version for _, version in claim.workflows]
    shards = None if claim.shards is None else sorted(claim.shards)
    due_by = claim.now if claim.due_by is None else claim.due_by
    taken = await link.fetch(
        sql(CLAIM, link.target), claim.worker, claim.now, due_by, claim.pool, names, versions, shards, claim.limit
    )
    return [ClaimedRun(*row) for row in taken]


async def next_wake(link: ConnectionPool, pool: str) -> float | None:
    earliest: float | None = await link.value(sql(NEXT_WAKE, link.target), pool)
    return earliest


async def owned(link: ConnectionPool, worker: str) -> list[str]:
    return [row[0] for row in await link.fetch(sql(OWNED, link.target), worker)]


async def mailed(link: ConnectionPool, worker: str, limit: int) -> list[str]:
    return [row[0] for row in await link.fetch(sql(MAILED, link.target), worker, limit)]


async def wake_held(
    link: ConnectionPool, workflows: Sequence[tuple[str, int]], kind: str, now: float
) -> frozenset[str]:
    names, versions = [name for name, _ in workflows], [version for _, version in workflows]
    return frozenset(row[0] for row in await link.fetch(sql(WAKE_HELD, link.target), names, versions, kind, now))


# --- workers -------------------------------------------------------------------------------------------------------


async def join(link: ConnectionPool, worker: WorkerRecord) -> bool:
    return await link.value(sql(JOIN, link.target), *rows.worker_row(worker)) is not None


async def renew(link: ConnectionPool, worker: WorkerRecord) -> bool:
    return await link.value(sql(RENEW, link.target), *rows.worker_row(worker)) is not None


async def declare_gone(link: ConnectionPool, worker_id: str, unless_renewed_after: float | None) -> bool:
    return await link.value(sql(DECLARE_GONE, link.target), worker_id, unless_renewed_after) is not None


async def release(link: ConnectionPool, worker_id: str, now: float, recovered: bool, limit: int) -> list[str]:
    found = await link.fetch(sql(RELEASE, link.target), worker_id, now, int(recovered), limit)
    return sorted(row[0] for row in found)


async def retire(link: ConnectionPool, worker_id: str) -> None:
    await link.fetch(sql(RETIRE, link.target), worker_id)


# --- upkeep and keys -----------------------------------------------------------------------------------------------


async def prune(link: ConnectionPool, now: float, limit: int, keep_ids_for: float) -> int:
    count: int = await link.value(sql(PRUNE, link.target), now, limit, keep_ids_for)
    return count


async def keys(link: ConnectionPool, name: str, now: float) -> list[SigningKey]:
    return [SigningKey(*row) for row in await link.fetch(sql(KEYS, link.target), name, now, secrets.token_bytes(32))]


async def add_key(link: ConnectionPool, name: str, now: float) -> SigningKey:
    while True:
        made = await link.fetch(sql(ADD_KEY, link.target), name, now, secrets.token_bytes(32))
        if made:  # else another was added at the same time, and has taken the number
            return SigningKey(*made[0])


async def remove_dead_letter(link: ConnectionPool, letter_id: str) -> bool:
    return await link.value(sql(REMOVE_LETTER, link.target), letter_id) is not None
