"""LateTags: apply changes of tags that reached a run as messages, but that its last turn has not seen.

A turn decides the end of a run before the message arrives, and is committed after it. The run then never reads the
message, so the worker applies the change to the ended run. If the worker dies first, the change is lost.
"""

from __future__ import annotations

from perdure.execution.store_session import StoreSession
from perdure.model.tags import TagValue, decode_tag_changes
from perdure.stores.writes import TagRun


class LateTags:
    """Runs that ended with unread messages. `tick` applies the changes of tags among them."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        self._run_ids: dict[str, None] = {}

    def add(self, run_id: str) -> None:
        """Check this run at the next tick."""
        self._run_ids[run_id] = None

    async def tick(self, now: float) -> float | None:
        """Apply the changes. Raises `StoreError` if the store is unavailable: the next tick continues."""
        while self._run_ids:
            run_id = next(iter(self._run_ids))
            changes: dict[str, TagValue | None] = {}
            for message in await self._session.store.inbox(run_id):
                if message.kind == "tag" and message.body is not None:
                    changes.update(decode_tag_changes(message.body))
            if changes:
                await self._session.committer.write(TagRun(run_id=run_id, tags=changes))
            self._run_ids.pop(run_id, None)
        return None
