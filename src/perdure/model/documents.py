"""Document: a small versioned record that perdure stores for itself, such as a schedule or a published schema."""

from __future__ import annotations

from msgspec import Struct


class Document(Struct, frozen=True, kw_only=True):
    """A stored document. `kind` and `id` identify it.

    `version` changes with every write. The store never gives a version twice, also not after the document was deleted
    and created again, so that a compare-and-set never mistakes a new document for an old one. `due_at` is when a
    periodic task must process the document; after `expires_at` the store may prune it.
    """

    kind: str
    id: str
    version: int
    body: bytes
    due_at: float | None = None
    expires_at: float | None = None
