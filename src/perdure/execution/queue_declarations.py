"""Declarations: store the settings of the queues that this process has imported, and log a change."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import asdict

from perdure.errors import StoreError
from perdure.execution.store_session import StoreSession
from perdure.model.documents import Document
from perdure.model.ids import new_token
from perdure.model.queue_records import QueueOverride, QueueSettings, QueueSummary
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Superseded
from perdure.stores.writes import ConfigureQueue, PutDocument

LOGGER = logging.getLogger("perdure.execution")
DECLARATION = "queue_declaration"  # the kind of the documents that say when a queue was declared
DOCUMENTS_PAGE = 500
MAX_ATTEMPTS = 20  # an operator or another worker may change the queue between the read and the write


async def declare_queues(session: StoreSession, declared: Mapping[str, QueueSettings], *, retry_forever: bool) -> None:
    """Store the declared settings of these queues. Overrides and pauses stay as they are."""
    left = dict(declared)
    for _ in range(MAX_ATTEMPTS):
        if not left:
            await record_declarations(session, declared)
            return
        known = {each.name: each for each in await session.read(session.store.queues, retry_forever=retry_forever)}
        left = {name: settings for name, settings in left.items() if _differs(known.get(name), settings)}
        writes = [_declaration(name, settings, known.get(name)) for name, settings in left.items()]
        for write, result in zip(writes, await session.committer.write_all(writes), strict=True):
            if isinstance(result, StoreError) and not (retry_forever and result.retryable):
                raise result
            if isinstance(result, Committed):
                _log_change(write.name, known.get(write.name), left.pop(write.name))
    if left:
        names = ", ".join(map(repr, left))
        raise StoreError(f"queues {names} were changed during each attempt to declare them; try again", retryable=True)


async def record_declarations(session: StoreSession, names: Iterable[str]) -> None:
    """Store that these queues were declared now, for the health check. A write that another worker makes suffices."""
    now = session.clock.now()
    known = {each.id: each.version for each in await _declarations(session.store)}
    body = session.codec.encode(now)
    writes = [
        PutDocument(kind=DECLARATION, id=name, base=known.get(name, 0), body=body, write_id=new_token())
        for name in names
    ]
    await session.committer.write_all(writes)


async def declaration_times(store: Store) -> dict[str, float]:
    """Return when each queue was declared last."""
    return {each.id: float(msgspec.json.decode(each.body)) for each in await _declarations(store)}


async def _declarations(store: Store) -> list[Document]:
    found: list[Document] = []
    while page := await store.documents(DECLARATION, found[-1].id if found else None, DOCUMENTS_PAGE):
        found += page
    return found


async def create_queue(session: StoreSession, name: str, settings: QueueSettings) -> None:
    """Create a queue unless it exists."""
    result = await session.committer.write(ConfigureQueue(name=name, base=0, declared=settings))
    assert isinstance(result, Committed | Superseded)


def _differs(known: QueueSummary | None, settings: QueueSettings) -> bool:
    return known is None or known.declared != settings


def _declaration(name: str, settings: QueueSettings, known: QueueSummary | None) -> ConfigureQueue:
    override, paused, base = QueueOverride(), None, 0
    if known is not None:
        override, paused, base = known.override, known.paused, known.version
    return ConfigureQueue(name=name, base=base, declared=settings, override=override, paused=paused)


def _log_change(name: str, known: QueueSummary | None, settings: QueueSettings) -> None:
    if known is None:
        return
    before, after = asdict(known.declared), asdict(settings)
    changed = ", ".join(
        f"{limit} {before[limit]} to {after[limit]}" for limit in after if before[limit] != after[limit]
    )
    LOGGER.info("Declaration of queue %s changed: %s", name, changed, extra={"queue": name})
