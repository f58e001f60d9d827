"""WorkflowPublisher: store what other processes must know to start this worker's workflows by name.

A document is written only if it has changed. With workers of several versions of the code, the last one that opens
decides, as for queues.
"""

from __future__ import annotations

from perdure.errors import StoreError
from perdure.execution.catalog import Catalog
from perdure.execution.store_session import StoreSession
from perdure.model.documents import Document
from perdure.model.ids import new_token
from perdure.model.shards import WorkflowVersions
from perdure.stores.writes import PutDocument
from perdure.workflows.publications import KIND, document_id, encode_publication, publish_workflow
from perdure.workflows.remote_steps import is_step_workflow

PAGE = 500
WRITES = 100  # per batch


class WorkflowPublisher:
    """Publishes the workflows of one worker: at its start, and those that are imported later."""

    def __init__(self, session: StoreSession, catalog: Catalog) -> None:
        self._session = session
        self._catalog = catalog
        self._published: WorkflowVersions = ()

    async def tick(self, now: float) -> float | None:
        """Publish the workflows if there are other ones than the last time. Return when to check again.

        Raises `StoreError` if the store is unavailable: the next tick continues.
        """
        versions = self._catalog.workflow_versions()
        if versions != self._published:
            await self._publish(versions)
            self._published = versions
        return now + self._session.config.seconds("sweep_interval") if self._catalog.is_open else None

    async def _publish(self, versions: WorkflowVersions) -> None:
        known = await self._read_documents() if versions else {}
        writes = []
        for name, version in versions:
            if is_step_workflow(name):  # only runs start them
                continue
            workflow = self._catalog.find(name, version)
            body = None if workflow is None else encode_publication(publish_workflow(workflow))
            stored = known.get(document_id(name, version))
            if body is not None and (stored is None or stored.body != body):
                base = 0 if stored is None else stored.version
                id = document_id(name, version)
                writes.append(PutDocument(kind=KIND, id=id, base=base, body=body, write_id=new_token()))
        for first in range(0, len(writes), WRITES):
            for result in await self._session.committer.write_all(writes[first : first + WRITES]):
                if isinstance(result, StoreError):  # another worker may have written it: that is no error
                    raise result

    async def _read_documents(self) -> dict[str, Document]:
        found: dict[str, Document] = {}
        after: str | None = None
        while page := await self._session.store.documents(KIND, after, PAGE):
            found.update((document.id, document) for document in page)
            after = page[-1].id
        return found
