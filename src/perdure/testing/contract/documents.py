"""Documents: compare-and-set, versions, idempotent writes, due times and expiry."""

from __future__ import annotations

import asyncio

from perdure.model.documents import Document
from perdure.model.records import document_hint
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Superseded
from perdure.stores.writes import PutDocument
from perdure.testing.contract.builders import ContractCase, case, dead_letter, refused, run


def put(id: str = "d", base: int = 0, body: bytes | None = b"{}", *, kind: str = "k", **fields: object) -> PutDocument:
    """Build a write of a document whose write id is unique to kind, id, base and body."""
    write_id = str(fields.pop("write_id", f"{kind}/{id}/{base}/{body!r}"))
    return PutDocument(kind=kind, id=id, base=base, body=body, write_id=write_id, **fields)  # type: ignore[arg-type]


async def put_version(store: Store, write: PutDocument) -> int:
    """Commit a write that must be accepted and return the new version."""
    (result,) = await store.commit([write])
    assert isinstance(result, Committed), result
    return result.version


async def ids_of(store: Store, kind: str = "k", **fields: object) -> list[str]:
    """Return the ids of a page of documents."""
    return [document.id for document in await store.documents(kind, **fields)]  # type: ignore[arg-type]


class DocumentCases(ContractCase):
    @case
    async def test_a_document_is_created_replaced_and_deleted_by_its_version(self, store: Store) -> None:
        assert await store.document("k", "d") is None
        first = await put_version(store, put(body=b"\x00\xff", due_at=5.5, expires_at=9.25))
        assert first > 0
        expected = Document(kind="k", id="d", version=first, body=b"\x00\xff", due_at=5.5, expires_at=9.25)
        assert await store.document("k", "d") == expected
        second = await put_version(store, put(base=first, body=b"2"))
        assert second > first
        assert await store.document("k", "d") == Document(kind="k", id="d", version=second, body=b"2")
        assert await put_version(store, put(base=second, body=None)) == 0
        assert await store.document("k", "d") is None
        assert await ids_of(store) == []

    @case
    async def test_another_version_is_superseded_and_changes_nothing(self, store: Store) -> None:
        version = await put_version(store, put(body=b"1"))
        for base in (0, version + 1):
            assert await store.commit([put(base=base, body=b"2")]) == [Superseded()]
            assert await store.commit([put(base=base, body=None)]) == [Superseded()]
        assert await store.commit([put("other", base=version)]) == [Superseded()], "of a document that is missing"
        assert await store.document("k", "d") == Document(kind="k", id="d", version=version, body=b"1")
        assert await store.document("k", "other") is None

    @case
    async def test_a_repeated_write_is_committed_with_the_same_version(self, store: Store) -> None:
        create = put(body=b"1")
        first = await put_version(store, create)
        assert await put_version(store, create) == first
        change = put(base=first, body=b"2")
        second = await put_version(store, change)
        assert await put_version(store, change) == second
        assert await store.commit([create]) == [Superseded()], "another write came after it"
        delete = put(base=second, body=None)
        assert [await put_version(store, delete), await put_version(store, delete)] == [0, 0]
        assert await put_version(store, put("never", base=7, body=None)) == 0

    @case
    async def test_equal_writes_in_one_batch_apply_once_and_in_order(self, store: Store) -> None:
        create, late = put(body=b"1"), put(body=b"2")
        results = await store.commit([create, create, late, put("e"), run("r")])
        assert results[0] == results[1]
        assert results[2] == Superseded()
        assert isinstance(results[3], Committed)
        assert await ids_of(store) == ["d", "e"]

    @case
    async def test_a_version_is_never_given_twice(self, store: Store) -> None:
        versions = []
        for n in range(4):
            versions.append(await put_version(store, put(body=b"1", write_id=f"create {n}")))
            versions.append(await put_version(store, put(base=versions[-1], body=b"2", write_id=f"change {n}")))
            await put_version(store, put(base=versions[-1], body=None))
        assert sorted(set(versions)) == versions
        for version in versions:
            assert await store.commit([put(base=version, body=b"late", write_id="late")]) == [Superseded()]
        await put_version(store, put(expires_at=5.0, write_id="expiring"))
        await store.prune(5.0)
        again = await put_version(store, put(write_id="again"))
        assert again > max(versions) + 1, "after it was pruned"

    @case
    async def test_of_concurrent_writes_of_one_version_exactly_one_is_committed(self, store: Store) -> None:
        other = await self.second(store)
        version = await put_version(store, put(body=b"0"))
        writes = [put(base=version, body=str(n).encode(), write_id=f"w{n}") for n in range(8)]
        handles = [store, other]
        results = await asyncio.gather(*(handles[n % 2].commit([write]) for n, write in enumerate(writes)))
        committed = [n for n, (result,) in enumerate(results) if isinstance(result, Committed)]
        assert len(committed) == 1
        document = await other.document("k", "d")
        assert document is not None
        assert document.body == writes[committed[0]].body

    @case
    async def test_dead_letters_of_a_document_are_stored_once_with_it(self, store: Store) -> None:
        first = put(body=b"1", dead_letters=(dead_letter("one", kind="schedule"), dead_letter("two", kind="schedule")))
        version = await put_version(store, first)
        assert [letter.id for letter in await store.dead_letters(kind="schedule")] == ["one", "two"]
        assert await store.remove_dead_letter("one")
        await put_version(store, first)
        assert [letter.id for letter in await store.dead_letters()] == ["two"], "not again by a repeated write"
        late = put(base=version + 1, body=b"2", dead_letters=(dead_letter("three"),))
        assert await store.commit([late]) == [Superseded()]
        await put_version(store, put(base=version, body=None, dead_letters=(dead_letter("four"),)))
        assert [letter.id for letter in await store.dead_letters()] == ["two", "four"]

    @case
    async def test_documents_are_paged_by_id_within_their_kind(self, store: Store) -> None:
        ids = ["B", "a", "a/b", "a%", "é", "x" * 300, "🦉"]
        await store.commit([put(id) for id in ids] + [put("a", kind="k2"), put("z", kind="K")])
        assert await ids_of(store) == sorted(ids)
        pages, after = [], None
        while page := await store.documents("k", after, 2):
            pages.append([document.id for document in page])
            after = page[-1].id
        assert [id for page in pages for id in page] == sorted(ids)
        assert [len(page) for page in pages] == [2, 2, 2, 1]
        assert await ids_of(store, "k2") == ["a"]
        assert await ids_of(store, "missing") == []
        await refused(store.documents("k", limit=0))

    @case
    async def test_due_documents_are_listed_by_time_and_id(self, store: Store) -> None:
        due = {"e": 3.0, "d": 1.0, "c": 2.0, "b": 2.0, "a": None, "f": 4.0}
        await store.commit([put(id, due_at=at) for id, at in due.items()] + [put("x", kind="k2", due_at=0.0)])
        assert await ids_of(store, due_by=0.5) == []
        assert await ids_of(store, due_by=3.0) == ["d", "b", "c", "e"]
        assert await ids_of(store, due_by=9.0, limit=2) == ["d", "b"]
        document = await store.document("k", "d")
        assert document is not None
        await store.commit([put("d", document.version, due_at=9.0)])
        assert await ids_of(store, due_by=9.0) == ["b", "c", "e", "f", "d"]
        await refused(store.documents("k", after="b", due_by=9.0))

    @case
    async def test_expired_documents_are_readable_until_they_are_pruned(self, store: Store) -> None:
        await store.commit([put("a", expires_at=100.0, due_at=50.0), put("b", expires_at=101.0), put("c")])
        assert await store.prune(99.0) == []
        assert await ids_of(store) == ["a", "b", "c"]
        assert await store.prune(100.0) == [], "only runs are returned"
        assert await ids_of(store) == ["b", "c"]
        assert await ids_of(store, due_by=1e9) == []
        document = await store.document("k", "b")
        assert document is not None
        await store.commit([put("b", document.version, expires_at=200.0)])
        await store.prune(150.0)
        assert await ids_of(store) == ["b", "c"], "the write moved its expiry"

    @case
    async def test_malformed_writes_are_refused(self, store: Store) -> None:
        for write in (put(""), put(kind=""), put(write_id=""), put(base=-1), put(body="text")):  # type: ignore[arg-type]
            await refused(store.commit([put("first"), write]))
        assert await ids_of(store) == [], "nothing of a refused batch is stored"

    @case
    async def test_listeners_are_notified_when_a_document_becomes_due_earlier(self, store: Store) -> None:
        changes: asyncio.Queue[frozenset[str] | None] = asyncio.Queue()
        unsubscribe = store.on_change(changes.put_nowait)

        async def wait_for_hint(kind: str) -> None:
            while (names := await asyncio.wait_for(changes.get(), 10)) is not None and document_hint(kind) not in names:
                pass

        version = await put_version(store, put(kind="s", due_at=50.0))
        await wait_for_hint("s")
        await put_version(store, put(kind="s", base=version, body=b"2", due_at=40.0))
        await wait_for_hint("s")
        unsubscribe()
