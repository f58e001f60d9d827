"""Make a file of an earlier schema: what a store of then had written."""

from __future__ import annotations

from pathlib import Path

import apsw

from perdure.stores.sqlite import schema


def copy_to_schema(source: Path, target: Path, version: int) -> None:
    """Copy the rows of a closed store into a new file of this schema version, without columns that it lacks."""
    connection = apsw.Connection(str(target))
    for script in schema.migrations()[:version]:
        connection.execute(script)
    connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}; PRAGMA user_version = {version}")
    connection.execute("ATTACH ? AS source", (str(source),))
    tables = "SELECT name FROM main.sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    for (table,) in connection.execute(tables).fetchall():
        columns = [row[1] for row in connection.execute(f"PRAGMA main.table_info({table})")]
        names = ", ".join(columns)
        connection.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM source.{table}")
    connection.close()
