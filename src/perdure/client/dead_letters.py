"""DeadLetterClient: list, replay and remove dead letters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perdure.client.schedules import ScheduleClient
from perdure.client.session import ClientSession
from perdure.client.views import DeadLetterView, dead_letter_view
from perdure.errors import WorkflowMisuse
from perdure.execution.store_writes import build_publish, fan_out_all, raise_for_delivery
from perdure.model.ids import new_token
from perdure.model.queries import MAX_LIMIT
from perdure.model.records import DeadLetter
from perdure.model.schedule_records import KIND as SCHEDULE_KIND
from perdure.model.validation import check_count, check_name, check_text
from perdure.stores.results import DeadLetterMissing
from perdure.stores.writes import DeliverMessage, PublishEvent, ReplayDeadLetter
from perdure.workflows.events import EventOptions, build_message, build_topic_event, event_name, options_of_name


class DeadLetterClient:
    """The calls `dead_letters`, `replay_dead_letter` and `remove_dead_letter` of a client; `Client` documents them."""

    def __init__(self, session: ClientSession, schedules: ScheduleClient) -> None:
        self._session = session
        self._schedules = schedules

    async def dead_letters(
        self, event: Any, kind: str | None, limit: int, after: str | None
    ) -> list[DeadLetterView[Any]]:
        session = self._session
        name = None if event is None else event_name(event)
        kind = None if kind is None else check_name("a dead letter's kind", kind)
        after = None if after is None else check_text("after", after)
        check_count("limit", limit, maximum=MAX_LIMIT)
        page = await session.read(lambda: session.store.dead_letters(limit, after, kind=kind, event=name))
        kind_of_value = event if isinstance(event, type) else Any
        return [dead_letter_view(dead_letter, session.codec, kind_of_value) for dead_letter in page]

    async def replay(self, dead_letter_id: str, to: str | None) -> bool:
        session, dead_letter_id = self._session, check_text("a dead letter's id", dead_letter_id)
        to = None if to is None else check_name("a run's id", to)
        dead_letter = await session.read(lambda: session.store.dead_letter(dead_letter_id))
        if dead_letter is None:
            return False
        if dead_letter.kind == SCHEDULE_KIND:
            return await self._replay_slots(dead_letter, to)
        send = self._build_replay(dead_letter, to)
        result = await session.committer.write(
            ReplayDeadLetter(dead_letter_id=dead_letter_id, send=send), lambda _: self._notify_local_worker(send)
        )
        if isinstance(result, DeadLetterMissing):
            return False
        if isinstance(send, DeliverMessage):
            raise_for_delivery(send.run_id, result, send.message.name)
        else:
            await fan_out_all(send.event.topic, result, session.store_session, wait_for_store=False)
        return True

    async def _replay_slots(self, dead_letter: DeadLetter, to: str | None) -> bool:
        """Start the missed slots of a schedule, then remove the dead letter. Return whether it was there.

        The internal run has an id of this dead letter, so that concurrent calls start one.
        """
        if to is not None or dead_letter.value is None:
            raise WorkflowMisuse(f"dead letter {dead_letter.id!r} has no event that could be sent to a run; omit `to`")
        await self._schedules.backfill_missed(dead_letter.id, dead_letter.value)
        return await self.remove(dead_letter.id)

    async def remove(self, dead_letter_id: str) -> bool:
        session, dead_letter_id = self._session, check_text("a dead letter's id", dead_letter_id)
        return await session.read(lambda: session.store.remove_dead_letter(dead_letter_id))

    def _build_replay(self, dead_letter: DeadLetter, to: str | None) -> DeliverMessage | PublishEvent:
        """Build the write that sends the event again.

        A new message id makes the store treat it as a new message; the reader sees the original event id.
        """
        if dead_letter.event_name is None or dead_letter.value is None or dead_letter.kind == "misfit":
            raise WorkflowMisuse(
                f"dead letter {dead_letter.id!r} ({dead_letter.kind}) contains no event to replay; fix the cause, "
                "then remove it"
            )
        now, config = self._session.clock.now(), self._session.config
        options = _replay_options(dead_letter.event_name)
        id, event_id = f"letter/{new_token()}", dead_letter.event_id or dead_letter.id
        if to is None:
            event = build_topic_event(options, dead_letter.value, event_id=event_id, id=id, sent_at=now)
            return build_publish(event, config, now)
        message = build_message(options, dead_letter.value, event_id=event_id, id=id, sent_at=now)
        return DeliverMessage(run_id=to, message=message, now=now, limit=config.max_pending_events)

    def _notify_local_worker(self, send: DeliverMessage | PublishEvent) -> None:
        if isinstance(send, DeliverMessage):
            self._session.local_worker.run_has_messages(send.run_id)
        else:
            self._session.local_worker.runs_may_be_due()


def _replay_options(name: str) -> EventOptions:
    """Return the options of an event class of this name. An event that is not read again is not discarded."""
    options = options_of_name(name) or EventOptions(name)
    kept = options.on_target_terminated != "discard"
    return options if kept else replace(options, on_target_terminated="dead_letter")
