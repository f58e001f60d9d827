"""Letters: looking at dead letters, sending them again, and throwing them away."""

from __future__ import annotations

from typing import Any

from perdure.errors import WorkflowMisuse
from perdure.events import EventOptions, event_name, message_of, topic_event_of
from perdure.messaging import Messaging
from perdure.names import check_count
from perdure.records import DeadLetter
from perdure.views import DeadLetterView, dead_letter_view


class Letters(Messaging):
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

        False if it was gone already. What `send` raises is raised, and the letter stays. Whoever repeats it, or does
        the same at the same time, delivers it once; two who send it to different places at once may both do so.
        """
        letter = await self._open.read(lambda: self._open.store.dead_letter(letter_id))
        if letter is None:
            return False
        await self._send_again(letter, to)
        return await self.remove_dead_letter(letter_id)

    async def remove_dead_letter(self, letter_id: str) -> bool:
        """Throw a dead letter away. False if it is gone already: somebody else was first."""
        return await self._open.read(lambda: self._open.store.remove_dead_letter(letter_id))

    async def _send_again(self, letter: DeadLetter, to: str | None) -> None:
        """Under an id of its own, so that two who do it at once send it once."""
        if letter.event_name is None or letter.value is None:
            raise WorkflowMisuse(
                f"dead letter {letter.id!r} ({letter.kind}) holds no event that could be sent again; deal with its "
                "cause, then remove it"
            )
        name, now = f"letter/{letter.id}", self._open.clock.now()
        options = EventOptions(letter.event_name, on_target_terminated="dead_letter")
        if to is None:
            await self._publish(topic_event_of(options, letter.value, id=name, sent_at=now))
        else:
            await self._put_mail(to, message_of(options, letter.value, id=name, sent_at=now))
