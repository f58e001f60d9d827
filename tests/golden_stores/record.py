"""Record a golden store of each kind with the current code: `python -m tests.golden_stores.record NAME`.

A golden store is never recorded again. It is what users have on disk, and later versions must open and continue it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
from pathlib import Path

from perdure.stores.postgres import schema as postgres_schema
from perdure.stores.sqlite import schema as sqlite_schema
from perdure.testing import Harness, VirtualClock
from tests.golden_stores.backends import BACKENDS, FOLDER, path_of
from tests.golden_stores.workflows import ALL, start_all


async def record(name: str, kind: str, folder: Path) -> None:
    clock, backend = VirtualClock(), BACKENDS[kind]
    store = backend.make(folder, clock)
    async with Harness(store, clock=clock) as harness:
        engine = await harness.engine(*ALL)
        await harness.drive(start_all(engine))
        await clock.advance(60)
        await harness.crash(engine)
    path_of(name, kind).parent.mkdir(parents=True, exist_ok=True)
    path_of(name, kind).write_bytes(await backend.dump(store))


def migration_hashes() -> dict[str, list[str]]:
    """Return a hash of each migration script, by kind of store."""
    scripts = {"sqlite": sqlite_schema.migrations(), "postgres": postgres_schema.migrations()}
    return {kind: [hashlib.sha256(each.encode()).hexdigest() for each in these] for kind, these in scripts.items()}


def main(name: str) -> None:
    if (FOLDER / name).exists():
        raise SystemExit(f"{FOLDER / name} exists; a golden store is never recorded again")
    with tempfile.TemporaryDirectory() as folder:
        for kind in BACKENDS:
            asyncio.run(record(name, kind, Path(folder)))
    (FOLDER / name / "migrations.json").write_text(json.dumps(migration_hashes(), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
