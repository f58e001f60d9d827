"""`perdure dead-letters replay --app` uses the options of the event class of the application."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.model.records import DeadLetter, RunStatus
from perdure.model.turns import TurnExtras
from perdure.stores.sqlite.store import SqliteStore
from perdure.testing import Harness, VirtualClock
from tests.engine.store_setup import Stage

APP = """
from perdure import event, workflow

@workflow
async def replayed_app(ctx) -> None: ...

@event(name="replayed.shared", delivery="after_create", consume=False)
class Shared:
    n: int
"""


async def store_dead_letter(path: Path) -> None:
    clock = VirtualClock()
    async with Harness(SqliteStore(str(path), clock=clock), clock=clock) as harness:
        await harness.client()
        stage = Stage(harness)
        await stage.run("r")
        dead_letter = DeadLetter(
            id="d", kind="event", at=1.0, reason="why", event_name="replayed.shared", value=b'{"n":1}'
        )
        await stage.turn("r", extras=TurnExtras(dead_letters=(dead_letter,)))
        await stage.end("r", RunStatus.SUCCEEDED)


async def options_in_topic(path: Path) -> tuple[str, bool]:
    store = SqliteStore(str(path))
    await store.open(shards=128)
    try:
        (event,) = await store.topic("replayed.shared")
        return event.delivery, event.consume
    finally:
        await store.close()


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["--app", "app.py"], ("after_create", False)), ([], ("all", True))]
)
def test_replay_uses_the_options_of_the_application(tmp_path, arguments, expected):
    (tmp_path / "app.py").write_text(APP)
    asyncio.run(store_dead_letter(tmp_path / "runs.db"))
    command = [sys.executable, "-m", "perdure.cli", "dead-letters", "replay", "d", "--store", "sqlite:///runs.db"]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert asyncio.run(options_in_topic(tmp_path / "runs.db")) == expected
