"""Expiry: end runs that were not admitted in time, and leave a dead letter of each.

The dead letter is an unread message in the mailbox of the run, which the finalization moves. The message and the end of
the run are one batch, and both are idempotent. A run that was admitted meanwhile and has executed is not ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from perdure.clock import to_datetime
from perdure.execution.store_session import StoreSession
from perdure.execution.store_writes import build_end_run, cancel_message
from perdure.model.ids import incarnation_of, origin_of
from perdure.model.records import Message, RunRecord
from perdure.stores.results import Committed
from perdure.stores.writes import DeliverMessage, Write

EXPIRED_WAIT = "expired_wait"
MESSAGE_NAME = f"~{EXPIRED_WAIT}"  # of the message that becomes the dead letter


async def end_expired(session: StoreSession, run_ids: Sequence[str]) -> list[str]:
    """End these waiting runs as cancelled, and return those that were ended."""
    now = session.clock.now()
    records = await session.store.records(run_ids)
    waiting = [each for each in records if isinstance(each, RunRecord) and each.waiting and _never_began(each)]
    writes: list[Write] = []
    for record in waiting:
        reason = session.codec.encode(_reason(record))
        name = f"{EXPIRED_WAIT}/{origin_of(record.id, incarnation_of(record.created_by))}/{record.generation}"
        message = Message(id=name, kind="event", name=MESSAGE_NAME, sent_at=now, policy="dead_letter")
        writes.append(DeliverMessage(run_id=record.id, message=message, now=now))
        writes.append(DeliverMessage(run_id=record.id, message=cancel_message(f"cancel/{name}", now, reason), now=now))
        retention = record.retention
        end = build_end_run(
            record.id, f"end/{name}", now, session.config, retention=retention, only_if_not_started=True
        )
        writes.append(end)
    results = await session.committer.write_all(writes)
    ended = [record.id for record, result in zip(waiting, results[2::3], strict=True) if isinstance(result, Committed)]
    if ended:
        session.waiters.notify(ended)
    return ended


def _never_began(record: RunRecord) -> bool:
    return record.first_executed_at is None


def _reason(record: RunRecord) -> str:
    since = to_datetime(record.created_at)
    return f"it was not admitted in time: it waited in queue {record.queue!r} since {since:%Y-%m-%d %H:%M:%S} UTC"
