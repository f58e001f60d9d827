"""MessageClient: events to runs and topics, and requests with replies.

Events are encoded by `perdure.workflows.events`; `perdure.execution.store_writes` raises the errors of `send`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from perdure.client.session import ClientSession, RunFollower
from perdure.errors import InvalidArgument, RunTerminated
from perdure.execution.store_writes import publish_event, raise_for_delivery
from perdure.model.ids import new_token
from perdure.model.records import RunRecord, RunStatus
from perdure.model.validation import check_name, check_seconds
from perdure.workflows.events import build_message, build_topic_event, encode_event
from perdure.workflows.internal import is_internal_name, refuse_internal
from perdure.workflows.replies import find_reply


class MessageClient:
    """The calls `send`, `request`, `broadcast` and `emit` of a client; `Client` documents them."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def send(self, run_id: str, event: Any, payload: Any, event_id: str | None) -> None:
        await self._send(run_id, event, payload, event_id, wants_reply=False)

    async def request(
        self, run_id: str, event: Any, timeout: float | timedelta | None, payload: Any, event_id: str | None, type: Any
    ) -> Any:
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        run_id = check_name("a run's id", run_id)
        with self._session.follow(run_id) as follower:
            follower.follow_if_remote()  # before the request: the run may reply at once
            sent_id = await self._send(run_id, event, payload, event_id, wants_reply=True)
            reply = await self._wait_for_reply(run_id, sent_id, seconds, follower)
            what = f"the reply of run {run_id!r}"
            return self._session.codec.decode(reply, Any if type is None else type, what=what)

    async def broadcast(self, event: Any, event_id: str | None) -> int:
        if isinstance(event, str):
            raise InvalidArgument("broadcast takes an event; use emit(topic, value) to send a value to a topic")
        return await self._publish(event, None, event_id)

    async def emit(self, topic: str, payload: Any, event_id: str | None) -> int:
        return await self._publish(check_name("a topic's name", topic), payload, event_id)

    async def _send(self, run_id: str, event: Any, payload: Any, event_id: str | None, *, wants_reply: bool) -> str:
        session = self._session
        options, body = encode_event(event, payload, session.codec)
        name, now = _check_event_id(event_id), session.clock.now()
        message = build_message(options, body, event_id=name, sent_at=now, wants_reply=wants_reply)
        run_id = check_name("a run's id", run_id)
        if is_internal_name(run_id) and (record := await session.find_run(run_id)) is not None:
            refuse_internal(record, "sent to")
        result = await session.deliver(run_id, message, session.config.max_pending_events)
        raise_for_delivery(run_id, result, message.name)
        return name

    async def _publish(self, event: Any, payload: Any, event_id: str | None) -> int:
        session = self._session
        options, body = encode_event(event, payload, session.codec)
        now = session.clock.now()
        topic_event = build_topic_event(options, body, event_id=_check_event_id(event_id), sent_at=now)
        woken = await publish_event(topic_event, session.store_session, wait_for_store=False)
        if woken:
            session.local_worker.runs_may_be_due()
        return woken

    async def _wait_for_reply(self, run_id: str, event_id: str, timeout: float | None, follower: RunFollower) -> bytes:
        """Return the encoded reply that the run publishes. Raises `RequestRejected` if it rejects the request."""
        session = self._session
        clock, waiters = session.clock, session.waiters
        requested_at = clock.now()
        deadline = None if timeout is None else requested_at + timeout
        requested_of: str | None = None
        while True:
            change = waiters.wait(run_id, end=False)
            try:
                follower.follow_if_remote()
                # Read the record first: a run that replies and ends in one commit must not look as if it never replied.
                record = await session.get_run(run_id)
                values = await session.read(lambda: session.store.published(run_id))
                if (reply := find_reply(run_id, event_id, values, session.codec)) is not None:
                    return reply
                if record.status.terminal:
                    raise RunTerminated(run_id, record.status)
                requested_of = requested_of or record.created_by
                if record.created_by != requested_of:  # restarted: the generation that has the request was terminated
                    raise RunTerminated(run_id, RunStatus.CANCELLED)
                if deadline is not None and clock.now() >= deadline:
                    raise TimeoutError(_describe_timeout(record, timeout))
                await session.wait_for_change(run_id, "reply", change, requested_at, deadline)
            finally:
                waiters.remove(run_id, change, end=False)


def _describe_timeout(record: RunRecord, timeout: float | None) -> str:
    text = f"run {record.id!r} has not replied within {timeout} seconds; it has the request"
    held = record.current_hold
    return text if held is None else f"{text}, and is held ({held.kind}): {held.reason}"


def _check_event_id(given: str | None) -> str:
    return new_token() if given is None else check_name("an event's id", given)
