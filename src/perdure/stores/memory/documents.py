"""The documents of the memory store, in order of id and of due time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from msgspec import Struct, field

from perdure.model.documents import Document
from perdure.model.records import document_hint
from perdure.stores import semantics as rules
from perdure.stores.memory.due_queue import DueQueue
from perdure.stores.results import Committed, WriteResult
from perdure.stores.writes import PutDocument


class StoredDocument(Struct, frozen=True):
    """A document and the id of the write that stored it."""

    document: Document
    write_id: str


class DocumentKind(Struct):
    """The documents of one kind: by id, and in the orders in which they are read."""

    by_id: dict[str, StoredDocument] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    due: list[tuple[float, str]] = field(default_factory=list)
    expiring: DueQueue = field(default_factory=DueQueue)


class MemoryDocuments:
    """All documents. `hints` collects the names for the next change hint."""

    def __init__(self) -> None:
        self._kinds: dict[str, DocumentKind] = {}
        self._last_version = 0  # of all documents, so that a version is never given twice
        self.hints: set[str] = set()

    def put(self, write: PutDocument) -> tuple[WriteResult, bool]:
        """Write or delete a document if its version is the write's base. Return whether this call did so."""
        stored = self._find(write.kind).by_id.get(write.id)
        version, write_id = (None, None) if stored is None else (stored.document.version, stored.write_id)
        refused = rules.refuse_document(write, version, write_id)
        if refused is not None:
            return refused, False
        before = None if stored is None else stored.document.due_at
        if stored is not None:
            self._remove(write.kind, stored.document)
        if write.body is None:
            return Committed(), True
        self._last_version += 1
        self._add(write, write.body)
        if rules.is_due_earlier(write.due_at, before):
            self.hints.add(document_hint(write.kind))
        return Committed(version=self._last_version), True

    def _add(self, write: PutDocument, body: bytes) -> None:
        kind = self._kinds.setdefault(write.kind, DocumentKind())
        document = Document(
            kind=write.kind,
            id=write.id,
            version=self._last_version,
            body=body,
            due_at=write.due_at,
            expires_at=write.expires_at,
        )
        kind.by_id[write.id] = StoredDocument(document, write.write_id)
        insort(kind.ids, write.id)
        if write.due_at is not None:
            insort(kind.due, (write.due_at, write.id))
        kind.expiring.put(write.id, write.expires_at)

    def _remove(self, name: str, document: Document) -> None:
        kind = self._kinds[name]
        del kind.by_id[document.id]
        del kind.ids[bisect_left(kind.ids, document.id)]
        if document.due_at is not None:
            del kind.due[bisect_left(kind.due, (document.due_at, document.id))]
        kind.expiring.put(document.id, None)
        if not kind.by_id:
            del self._kinds[name]

    def _find(self, name: str) -> DocumentKind:
        return self._kinds.get(name) or DocumentKind()

    def take_hints(self) -> set[str]:
        """Return the names for a change hint since the last call."""
        hints, self.hints = self.hints, set()
        return hints

    def get(self, kind: str, id: str) -> Document | None:
        """Return a document, or None."""
        stored = self._find(kind).by_id.get(id)
        return None if stored is None else stored.document

    def page(self, name: str, after: str | None, limit: int) -> list[Document]:
        """Return the documents of a kind after this id, in order of id."""
        kind = self._find(name)
        first = 0 if after is None else bisect_right(kind.ids, after)
        return [kind.by_id[id].document for id in kind.ids[first : first + limit]]

    def due(self, name: str, due_by: float, limit: int) -> list[Document]:
        """Return the documents of a kind that are due by this time, in order of (due_at, id)."""
        kind = self._find(name)
        end = bisect_right(kind.due, due_by, key=lambda due: due[0])
        return [kind.by_id[id].document for _, id in kind.due[: min(end, limit)]]

    def prune(self, now: float) -> None:
        """Delete the documents that have expired by now."""
        for name, kind in tuple(self._kinds.items()):
            while (head := kind.expiring.head()) is not None and head[0] <= now:
                self._remove(name, kind.by_id[head[1]].document)
