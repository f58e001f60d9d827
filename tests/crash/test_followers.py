"""A reader in one process follows a run that executes in another, and is notified of every change.

No poll and no sweep happens in the time of a test, in either process: only a notification can wake the reader.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from perdure import Client
from perdure.client import session
from perdure.stores.sqlite import store as sqlite_store
from tests.crash.process_harness import STORES, Scenario, scenario
from tests.crash.programs.followed_worker import CONFIG, HOUR, Double, Stop, doubler, echo, writer
from tests.crash.store_readers import TIMEOUT_SECONDS

WORDS = ["one", "two", "three"]


@pytest.fixture(autouse=True)
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MIN_POLL_INTERVAL_SECONDS", HOUR)
    monkeypatch.setattr(sqlite_store, "POLL_INTERVAL_SECONDS", HOUR)


def start_worker(here: Scenario) -> subprocess.Popen[bytes]:
    """Start a worker; return when it has joined."""
    worker = here.start("followed_worker")
    here.until(lambda: worker.pid in {row.pid for row in here.book.workers()}, "the worker joins")
    return worker


def call(here: Scenario, calls: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS), Client(here.url, config=CONFIG) as client:
            await calls(client)

    try:
        asyncio.run(main())
    except TimeoutError:
        pytest.fail(f"the reader was not notified\n{here.explanation()}")


@pytest.mark.parametrize("kind", STORES)
def test_reader_of_a_stream_gets_each_item_without_a_poll(kind: str, tmp_path: Path) -> None:
    async def read(client: Client) -> None:
        await client.start(writer, str(here.log), str(tmp_path), WORDS, id="w")
        words = client.read_stream("w", "words")
        for word in WORDS:
            (tmp_path / word).touch()
            assert await anext(words) == word
        await client.send("w", Stop())
        assert [word async for word in words] == []

    with scenario(tmp_path, kind) as here:
        start_worker(here)
        call(here, read)


@pytest.mark.parametrize("kind", STORES)
def test_caller_gets_each_reply_without_a_poll(kind: str, tmp_path: Path) -> None:
    async def request(client: Client) -> None:
        run = await client.start(doubler, str(here.log), 3, id="d")
        for number in range(3):
            assert await client.request("d", Double(number)) == 2 * number
        await client.send("d", Stop())
        assert await run.result() == 3

    with scenario(tmp_path, kind) as here:
        start_worker(here)
        call(here, request)


@pytest.mark.parametrize("kind", STORES)
def test_watcher_gets_each_entry_without_a_poll(kind: str, tmp_path: Path) -> None:
    async def watch(client: Client) -> None:
        await client.start(writer, str(here.log), str(tmp_path), WORDS, id="w")
        for word in WORDS:
            (tmp_path / word).touch()
        entries = client.watch("w")
        while (entry := await anext(entries)).location != "write_words" or entry.settled_at is None:
            pass  # it must arrive while the run waits for its last event

    with scenario(tmp_path, kind) as here:
        start_worker(here)
        call(here, watch)


@pytest.mark.parametrize("kind", STORES)
def test_run_starts_receives_and_ends_in_another_process_without_a_poll(kind: str, tmp_path: Path) -> None:
    async def send(client: Client) -> None:
        for number in range(20):
            run = await client.start(echo, str(here.log), id=f"e{number}")
            await client.send(run.id, Double(number))
            assert await run.result() == number

    with scenario(tmp_path, kind) as here:
        start_worker(here)
        call(here, send)


@pytest.mark.parametrize("kind", STORES)
def test_worker_that_takes_the_run_over_learns_of_its_reader(kind: str, tmp_path: Path) -> None:
    """The second worker starts after the reader has followed the run, and executes the step again."""

    async def read(client: Client) -> None:
        first = await asyncio.to_thread(start_worker, here)
        await client.start(writer, str(here.log), str(tmp_path), WORDS, id="w")
        words = client.read_stream("w", "words")
        first_word = asyncio.ensure_future(anext(words))
        await asyncio.to_thread(here.until, lambda: here.effects("begun"), "the step executes")
        await asyncio.to_thread(start_worker, here)
        first.send_signal(signal.SIGTERM)
        await asyncio.to_thread(here.until, lambda: len(here.effects("begun")) == 2, "the step executes again")
        for number, word in enumerate(WORDS):
            (tmp_path / word).touch()
            assert await (first_word if number == 0 else anext(words)) == word

    with scenario(tmp_path, kind) as here:
        call(here, read)
