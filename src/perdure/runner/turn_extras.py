"""What the next commit changes besides the history: subscriptions, what others are shown, what is no longer needed."""

from __future__ import annotations

from perdure.model.records import DeadLetter, PublishedValue, StreamItem, Subscription
from perdure.model.turns import TurnExtras
from perdure.runner.pending import PendingEntry


class TurnExtrasBuilder:
    """Gathers during a turn; `take` hands it over and begins anew."""

    __slots__ = ("any", "dead_letters", "dropped", "published", "returned", "streamed", "subscribed", "unsubscribed")

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.any = False
        self.subscribed: dict[str, Subscription] = {}
        self.unsubscribed: list[str] = []
        self.returned: list[int] = []
        self.published: dict[str, PublishedValue] = {}
        self.streamed: list[StreamItem] = []
        self.dropped: list[str] = []
        self.dead_letters: list[DeadLetter] = []

    def subscribe(self, target: str, topics: tuple[str, ...]) -> None:
        self.any = True
        self.subscribed[target] = Subscription(target, topics)

    def unsubscribe(self, pending: PendingEntry) -> None:
        """An open receive is answered or given up; one that was opened in this very turn has never subscribed."""
        question = pending.question
        if question is None or question.wants is None:
            return
        if self.subscribed.pop(pending.target, None) is None:
            self.any = True
            self.unsubscribed.append(pending.target)

    def release_assignment(self, number: int) -> None:
        """An assignment that no receive wants: it goes back to its place in the topic."""
        self.any = True
        self.returned.append(number)

    def publish(self, what: PublishedValue | StreamItem) -> None:
        self.any = True
        if isinstance(what, PublishedValue):
            self.published[what.key] = what
        else:
            self.streamed.append(what)

    def drop(self, location: str) -> None:
        self.any = True
        self.dropped.append(location)

    def add_dead_letter(self, letter: DeadLetter) -> None:
        self.any = True
        self.dead_letters.append(letter)

    def take(self) -> TurnExtras | None:
        if not self.any:
            return None
        taken = TurnExtras(
            dropped=tuple(self.dropped),
            subscribe=tuple(self.subscribed.values()),
            unsubscribe=tuple(self.unsubscribed),
            released_assignments=tuple(self.returned),
            published=tuple(self.published.values()),
            streamed=tuple(self.streamed),
            dead_letters=tuple(self.dead_letters),
        )
        self._begin()
        return taken if taken != NOTHING else None


NOTHING = TurnExtras()
