"""Documents of the SQLite store. Writes use the writer's connection, within the transaction of their batch."""

from __future__ import annotations

import apsw

from perdure.model.documents import Document
from perdure.model.records import document_hint
from perdure.stores import semantics as rules
from perdure.stores import sql_rows
from perdure.stores.paging import check_document_page
from perdure.stores.results import Committed, WriteResult
from perdure.stores.sqlite import finalization, rows
from perdure.stores.writes import PutDocument

COLUMNS = "id, kind, version, body, due_at, expires_at"
STORED = "SELECT version, write_id, due_at FROM documents WHERE kind = ? AND id = ?"
NEXT_NUMBER = """
    INSERT INTO counters (name, value) VALUES (?, 1)
    ON CONFLICT (name) DO UPDATE SET value = value + 1 RETURNING value"""
PUT = """
    INSERT INTO documents (kind, id, version, body, write_id, due_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (kind, id) DO UPDATE SET version = excluded.version, body = excluded.body,
           write_id = excluded.write_id, due_at = excluded.due_at, expires_at = excluded.expires_at"""
DELETE = "DELETE FROM documents WHERE kind = ? AND id = ?"
DOCUMENT = f"SELECT {COLUMNS} FROM documents WHERE kind = ? AND id = ?"
DOCUMENTS = f"SELECT {COLUMNS} FROM documents WHERE kind = ? AND id > ? ORDER BY id LIMIT ?"
DUE = f"SELECT {COLUMNS} FROM documents WHERE kind = ? AND due_at <= ? ORDER BY due_at, id LIMIT ?"
EXPIRED = "SELECT rowid FROM documents WHERE expires_at <= ? LIMIT ?"
DROP = "DELETE FROM documents WHERE rowid = ?"


def put(connection: apsw.Connection, write: PutDocument, changed: set[str]) -> WriteResult:
    """Write or delete a document if its version is the write's base. `changed` gets the name for a change hint."""
    version, write_id, due_at = connection.execute(STORED, (write.kind, write.id)).fetchone() or (None, None, None)
    refused = rules.refuse_document(write, version, write_id)
    if refused is not None:
        return refused
    connection.executemany(finalization.ADD_DEAD_LETTER, map(rows.dead_letter_row, write.dead_letters))
    if write.body is None:
        connection.execute(DELETE, (write.kind, write.id))
        return Committed()
    new = next_number(connection, "documents")
    times = (write.due_at, write.expires_at)
    connection.execute(PUT, (write.kind, write.id, new, rows.pack(write.body), write.write_id, *times))
    if rules.is_due_earlier(write.due_at, due_at):
        changed.add(document_hint(write.kind))
    return Committed(version=new)


def next_number(connection: apsw.Connection, counter: str) -> int:
    """Return the next number of a counter. It never returns a number twice."""
    number: int = connection.execute(NEXT_NUMBER, (counter,)).get
    return number


def document(connection: apsw.Connection, kind: str, document_id: str) -> Document | None:
    """Return a document, or None. Raises `StoreError` if it cannot be read."""
    found = connection.execute(DOCUMENT, (kind, document_id))
    read = sql_rows.decode_all(f"document of kind {kind!r}", document_of_row, found)
    return read[0] if read else None


def documents(
    connection: apsw.Connection, kind: str, after: str | None, limit: int, due_by: float | None
) -> list[Document]:
    """Return a page of the documents of a kind: by id, or those due by a time, earliest first."""
    limit = check_document_page(after, limit, due_by)
    sql, start = (DOCUMENTS, after or "") if due_by is None else (DUE, due_by)
    return sql_rows.decode_readable("document", document_of_row, connection.execute(sql, (kind, start, limit)))


def document_of_row(row: sql_rows.Row) -> Document:
    """Return the document of a row with `COLUMNS`."""
    id, kind, version, body, due_at, expires_at = row
    if not isinstance(body, str | bytes):
        raise TypeError(f"the body must be text or a blob, not {type(body).__name__}")
    payload = sql_rows.unpack(body)
    assert payload is not None
    return Document(kind=kind, id=id, version=version, body=payload, due_at=due_at, expires_at=expires_at)
