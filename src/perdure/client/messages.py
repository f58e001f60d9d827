"""Messaging: events to runs and topics, requests, and the completion of deferreds.

What an event is and how it is encoded is `perdure.workflows.events`' business; what the store answers is turned into
the errors of SPEC's `send` by `perdure.execution.store_writes`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from perdure.client.session import ClientSession
from perdure.errors import InvalidArgument, InvalidToken, RunTerminated
from perdure.execution.external_effects import error_to_record_lossy
from perdure.execution.store_writes import publish_event, raise_for_delivery
from perdure.model.ids import new_token
from perdure.model.records import Message, RunResult, RunStatus, SigningKey, TopicEvent
from perdure.model.validation import check_name, check_seconds
from perdure.stores.results import MessageDelivered, RunMissing
from perdure.workflows.events import build_message, build_topic_event, encode_event
from perdure.workflows.tokens import KEY_ACTIVATION_DELAY_SECONDS, KEYS, make_token, read_token

REPLY = "~reply/"


class MessageClient(ClientSession):
    """Every way to tell a run something that its workflow waits for."""

    async def send(self, run_id: str, event: Any, payload: Any = None, *, event_id: str | None = None) -> None:
        """Put an event into a run's mailbox: an instance of an `@event` class, or a topic's name with a value.

        Once per `event_id`. Raises `RunNotFound`, `RunTerminated`, or `QueueFull`.
        """
        await self._send(run_id, event, payload, event_id, wants_reply=False)

    async def request(
        self,
        run_id: str,
        event: Any,
        timeout: float | timedelta | None = None,
        *,
        payload: Any = None,
        event_id: str | None = None,
    ) -> Any:
        """Send an event that the run answers, and wait for the answer.

        Raises what `send` raises; `RunTerminated` also if the run ends without answering; `TimeoutError`. Who asks
        again under the same `event_id`, after a restart say, asks nothing new and gets the answer that was given.
        """
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        sent = await self._send(run_id, event, payload, event_id, wants_reply=True)
        return await self._reply(run_id, sent, seconds)

    async def broadcast(self, event: Any, *, event_id: str | None = None) -> int:
        """Put an event into the topic of its name, once per `event_id`. How many runs it woke."""
        if isinstance(event, str):
            raise InvalidArgument(f"broadcast takes an event; emit({event!r}, value) sends a value to a topic")
        return await self._broadcast(event, None, event_id)

    async def emit(self, topic: str, payload: Any = None, *, event_id: str | None = None) -> int:
        """Put a value into a topic, once per `event_id`. How many runs it woke."""
        return await self._broadcast(check_name("a topic's name", topic), payload, event_id)

    async def _send(self, run_id: str, event: Any, payload: Any, event_id: str | None, *, wants_reply: bool) -> str:
        options, body = encode_event(event, payload, self._open.codec)
        name, now = _event_id(event_id), self._open.clock.now()
        await self._send_message(
            run_id, build_message(options, body, event_id=name, sent_at=now, wants_reply=wants_reply)
        )
        return name

    async def _send_message(self, run_id: str, message: Message) -> MessageDelivered:
        return raise_for_delivery(run_id, await self._deliver(run_id, message, self._config.max_pending_events))

    async def _broadcast(self, event: Any, payload: Any, event_id: str | None) -> int:
        options, body = encode_event(event, payload, self._open.codec)
        now = self._open.clock.now()
        return await self._publish(build_topic_event(options, body, event_id=_event_id(event_id), sent_at=now))

    async def _publish(self, event: TopicEvent) -> int:
        woken = await publish_event(event, self._open, patient=False)
        if woken:
            self._woken()
        return woken

    async def _reply(self, run_id: str, event_id: str, timeout: float | None) -> Any:
        """The value that the run shows under the request's own key, once it does."""
        clock, hub, key = self._open.clock, self._open.hub, REPLY + event_id
        asked_at = clock.now()
        deadline = None if timeout is None else asked_at + timeout
        while True:
            news = hub.wait(run_id, end=False)
            try:
                # In this order: an answer that is given with the run's end must not be missed.
                record = await self._record(run_id, retry_forever=timeout is None)
                values = await self._open.read(lambda: self._open.store.published(run_id), for_ever=timeout is None)
                for value in values:
                    if value.key == key:
                        return self._open.codec.decode(value.value, what=f"the reply of run {run_id!r}")
                if record.status.terminal:
                    raise RunTerminated(run_id, record.status)
                if deadline is not None and clock.now() >= deadline:
                    raise TimeoutError(f"run {run_id!r} has not answered within {timeout} seconds; it has the request")
                await self._wait_for_change_or_poll(run_id, news, asked_at, deadline)
            finally:
                hub.remove(run_id, news, end=False)

    # --- deferreds

    async def complete(self, token: str, value: Any = None) -> bool:
        """Give a deferred its value. The first to settle it wins: False if it was settled, or its run has gone on.

        Raises `InvalidToken` if the token is forged, or its run unknown.
        """
        ending = RunResult(result=self._open.codec.encode(value, what="the value of a deferred"))
        return await self._settle_deferred(token, ending)

    async def fail(self, token: str, error: BaseException | str) -> bool:
        """Make a deferred raise this error; like `complete` otherwise."""
        if isinstance(error, str):
            error = Exception(error)
        elif not isinstance(error, BaseException):
            raise InvalidArgument(f"a deferred fails with an exception or a text, not with {error!r}")
        return await self._settle_deferred(
            token, RunResult(RunStatus.FAILED, error=error_to_record_lossy(error, self._open.codec))
        )

    async def deferred_token(self, run_id: str, name: str) -> str:
        """The token of a run's deferred, also before the run has come to it. `RunNotFound` if there is no run."""
        check_name("a deferred's name", name)
        record = await self._record(run_id)
        first_executed_at = record.created_at if record.first_executed_at is None else record.first_executed_at
        return make_token(await self._keys(), run_id, record.epoch, name, at=first_executed_at)

    async def rotate_keys(self) -> None:
        """Sign the tokens of runs that begin from two minutes on with a new key; older tokens stay valid."""
        in_use_at = self._open.clock.now() + KEY_ACTIVATION_DELAY_SECONDS
        await self._keys()  # makes the first one, if there is none yet: until then something has to sign
        await self._open.read(lambda: self._open.store.add_key(KEYS, in_use_at))

    async def _keys(self) -> list[SigningKey]:
        now = self._open.clock.now()
        return await self._open.read(lambda: self._open.store.keys(KEYS, now))

    async def _settle_deferred(self, token: str, ending: RunResult) -> bool:
        run_id, epoch, name = read_token(await self._keys(), token)
        record = await self._find(run_id)
        if record is None:
            raise InvalidToken(f"the token is that of run {run_id!r}, which is not there; it may have been pruned")
        if record.epoch != epoch or record.status.terminal:
            return False
        message = Message(
            id=f"deferred/{epoch}/{name}",
            kind="deferred",
            name=name,
            body=msgspec.json.encode(ending),
            sent_at=self._open.clock.now(),
        )
        answer = await self._deliver(run_id, message)
        if isinstance(answer, RunMissing):
            raise InvalidToken(f"the token is that of run {run_id!r}, which has been pruned")
        return isinstance(answer, MessageDelivered) and answer.fresh


def _event_id(given: str | None) -> str:
    return new_token() if given is None else check_name("an event's id", given)
