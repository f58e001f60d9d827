"""Open children: the attached children of a run that have not ended, in pages.

Those of an earlier run with the same id are not among them: the run must neither cancel nor end them (ADR 26).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from msgspec import Struct

from perdure.model.ids import incarnation_of, origin_of
from perdure.model.records import RunRecord
from perdure.stores.protocol import Store

PAGE = 500

Read = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]  # calls the store, with retries or without


class OpenChild(Struct, frozen=True):
    """The id of a child, and how long it is retained after its end (None: by default, or unknown)."""

    id: str
    retention: float | None = None


async def open_children(store: Store, parent: RunRecord, read: Read) -> AsyncIterator[list[OpenChild]]:
    """Yield the open children of a run in pages, in order of id."""
    after: str | None = None
    while ids := await read(partial(store.open_children, parent.id, PAGE, after)):
        after = ids[-1]
        found = await read(partial(store.records, ids))
        yield [
            OpenChild(id, child.retention if isinstance(child, RunRecord) else None)
            for id, child in zip(ids, found, strict=True)
            if child is not None and not (isinstance(child, RunRecord) and is_of_earlier_run(child, parent))
        ]


def is_of_earlier_run(child: RunRecord, parent: RunRecord) -> bool:
    """Return whether an earlier run with the id of `parent` has started this child."""
    incarnation = incarnation_of(parent.created_by)
    if child.created_by.startswith(f"child/{origin_of(parent.id, incarnation)}/"):
        return False
    if incarnation and child.created_by.startswith(f"child/{parent.id}~"):
        return True
    return child.created_at < parent.created_at  # started by a version without incarnations
