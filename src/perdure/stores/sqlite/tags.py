"""Tags of runs in the SQLite store: the rows of the index `run_tags`, and changes of the tags of a stored run.

The functions use the writer's connection, within the transaction of their batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import apsw

from perdure.errors import StoreError
from perdure.model.tags import Tags, TagValue, index_tag
from perdure.stores import semantics as rules
from perdure.stores import sql_rows

ADD_TAG = "INSERT OR REPLACE INTO run_tags VALUES (?, ?, ?, ?, ?, ?)"
DROP_TAG = "DELETE FROM run_tags WHERE run_pk = ? AND key = ?"
TAGS = "SELECT id, tags, created_at FROM runs WHERE pk = ?"
SET_TAGS = "UPDATE runs SET tags = ? WHERE pk = ?"


def tag_rows(run_pk: int, tags: Tags, created_at: float) -> list[sql_rows.Row]:
    """Return the values of `ADD_TAG` for the tags of a run."""
    rows: list[sql_rows.Row] = []
    for key, value in tags.items():
        if type(value) is str:  # the common case, without the record
            rows.append((run_pk, key, "text", value, None, created_at))
        else:
            tag = index_tag(key, value)
            rows.append((run_pk, key, tag.kind, tag.text, tag.number, created_at))
    return rows


def change_tags(connection: apsw.Connection, run_pk: int, changes: Mapping[str, TagValue | None]) -> None:
    """Set or remove tags of a stored run. Rows of the index that stay the same are not written."""
    id, stored, created_at = connection.execute(TAGS, (run_pk,)).get
    try:
        before = sql_rows.tags_of(stored)
    except Exception as error:
        raise StoreError(f"the tags of run {id!r} cannot be read ({error}); see `perdure doctor`") from error
    after = rules.changed_tags(before, changes)
    if after is None:
        return
    connection.execute(SET_TAGS, (sql_rows.tags_as_json(after), run_pk))
    kept = {row[1]: row for row in tag_rows(run_pk, before, created_at)}
    connection.executemany(DROP_TAG, [(run_pk, key) for key in before if key not in after])
    added = [row for row in tag_rows(run_pk, after, created_at) if kept.get(row[1]) != row]
    connection.executemany(ADD_TAG, added)
