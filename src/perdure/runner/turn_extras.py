"""What the next commit changes besides the history: subscriptions, published values, tags, deletions, dead letters."""

from __future__ import annotations

from perdure.model.records import DeadLetter, PublishedValue, StreamItem, Subscription
from perdure.model.tags import TagChanges, TagValue
from perdure.model.turns import TurnExtras
from perdure.runner.pending import PendingEntry


class TurnExtrasBuilder:
    """Collects the extras of a turn. `any` is whether there may be some: most turns have none."""

    __slots__ = (
        "any",
        "dead_letters",
        "dropped",
        "published",
        "released",
        "streamed",
        "subscribed",
        "tags",
        "unsubscribed",
    )

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.any = False
        self.subscribed: dict[str, Subscription] = {}
        self.unsubscribed: list[str] = []
        self.released: list[int] = []
        self.published: dict[str, PublishedValue] = {}
        self.streamed: list[StreamItem] = []
        self.dropped: list[str] = []
        self.dead_letters: list[DeadLetter] = []
        self.tags: dict[str, TagValue | None] = {}

    def subscribe(self, target: str, topics: tuple[str, ...]) -> None:
        """Subscribe an open receive to topics."""
        self.any = True
        self.subscribed[target] = Subscription(target, topics)

    def unsubscribe(self, pending: PendingEntry) -> None:
        """End the subscription of a completed or cancelled receive. One of this very turn was never written."""
        command = pending.command
        if command is None or command.wants is None:
            return
        if self.subscribed.pop(pending.target, None) is None:
            self.any = True
            self.unsubscribed.append(pending.target)

    def release_assignment(self, number: int) -> None:
        """Release an assigned event that no receive wants: it keeps its offset and goes to the next subscriber.

        A completion of a deferred that does not fit is released too: the store accepts another one.
        """
        self.any = True
        self.released.append(number)

    def publish(self, value: PublishedValue | StreamItem) -> None:
        """Publish a value or append a stream item."""
        self.any = True
        if isinstance(value, PublishedValue):
            self.published[value.key] = value
        else:
            self.streamed.append(value)

    def tag(self, changes: TagChanges) -> None:
        """Change tags of the run; a later change of one tag replaces an earlier one."""
        self.any = True
        self.tags.update(changes)

    def drop(self, location: str) -> None:
        """Delete the entries at and below a location."""
        self.any = True
        self.dropped.append(location)

    def add_dead_letter(self, dead_letter: DeadLetter) -> None:
        """Store a dead letter."""
        self.any = True
        self.dead_letters.append(dead_letter)

    def take(self) -> TurnExtras | None:
        """Return the extras of this turn, None if there are none, and start the next turn's."""
        if not self.any:
            return None
        taken = TurnExtras(
            dropped=tuple(self.dropped),
            subscribe=tuple(self.subscribed.values()),
            unsubscribe=tuple(self.unsubscribed),
            released_assignments=tuple(self.released),
            published=tuple(self.published.values()),
            streamed=tuple(self.streamed),
            dead_letters=tuple(self.dead_letters),
            tags=self.tags,
        )
        self._reset()
        return taken if taken != NOTHING else None


NOTHING = TurnExtras()
