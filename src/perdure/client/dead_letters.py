"""Letters: looking at dead letters, sending them again, and throwing them away."""

from __future__ import annotations

from typing import Any

from perdure.client.messages import MessageClient
from perdure.client.views import DeadLetterView, dead_letter_view
from perdure.errors import WorkflowMisuse
from perdure.execution.store_writes import build_publish, fan_out_all, raise_for_delivery
from perdure.model.ids import new_token
from perdure.model.records import DeadLetter
from perdure.model.validation import check_count, check_name
from perdure.stores.results import DeadLetterMissing
from perdure.stores.writes import DeliverMessage, PublishEvent, ReplayDeadLetter
from perdure.workflows.events import EventOptions, build_message, build_topic_event, event_name


class DeadLetterClient(MessageClient):
    """What could not be delivered or carried out is kept until a person deals with it here."""

    async def dead_letters(
        self, event: Any = None, *, kind: str | None = None, limit: int = 100, after: str | None = None
    ) -> list[DeadLetterView]:
        """Dead letters in the order in which they came; of one event (its class or name) or one kind, in pages."""
        name = None if event is None else event_name(event)
        check_count("limit", limit)
        read = self._open.store.dead_letters
        letters = await self._open.read(lambda: read(limit, after, kind=kind, event=name))
        return [dead_letter_view(letter, self._open.codec) for letter in letters]

    async def replay_dead_letter(self, letter_id: str, to: str | None = None) -> bool:
        """Send an undelivered event again: to its topic, or to a run by the rules of `send`. Then the letter is gone.

        False if it was gone already. What `send` raises is raised, and the letter stays. Sending and removing are one
        write, so that of all who do it, wherever they send it, one delivers it, and once.
        """
        letter = await self._open.read(lambda: self._open.store.dead_letter(letter_id))
        if letter is None:
            return False
        send = self._build_replay(letter, to)
        answer = await self._open.committer.write(
            ReplayDeadLetter(letter_id=letter_id, send=send), lambda _: self._notify_local_worker(send)
        )
        if isinstance(answer, DeadLetterMissing):
            return False
        if isinstance(send, DeliverMessage):
            raise_for_delivery(send.run_id, answer)
        else:
            await fan_out_all(send.event.topic, answer, self._open, wait_for_store=False)
        return True

    async def remove_dead_letter(self, letter_id: str) -> bool:
        """Throw a dead letter away. False if it is gone already: somebody else was first."""
        return await self._open.read(lambda: self._open.store.remove_dead_letter(letter_id))

    def _build_replay(self, letter: DeadLetter, to: str | None) -> DeliverMessage | PublishEvent:
        """Under an id by which the store knows this very call; for its reader it is the event that it always was."""
        if letter.event_name is None or letter.value is None:
            raise WorkflowMisuse(
                f"dead letter {letter.id!r} ({letter.kind}) holds no event that could be sent again; deal with its "
                "cause, then remove it"
            )
        now, config = self._open.clock.now(), self._config
        options = EventOptions(letter.event_name, on_target_terminated="dead_letter")
        id, event_id = f"letter/{new_token()}", letter.event_id or letter.id
        if to is None:
            event = build_topic_event(options, letter.value, event_id=event_id, id=id, sent_at=now)
            return build_publish(event, config, now)
        check_name("a run's id", to)
        message = build_message(options, letter.value, event_id=event_id, id=id, sent_at=now)
        return DeliverMessage(run_id=to, message=message, now=now, limit=config.max_pending_events)

    def _notify_local_worker(self, send: DeliverMessage | PublishEvent) -> None:
        if isinstance(send, DeliverMessage):
            self._mailed(send.run_id)
        else:
            self._woken()
