"""Invalid input is refused with an error that says what to do, and nothing is stored."""

import asyncio
import sqlite3
import stat
from datetime import timedelta
from typing import Any

import pytest

from perdure import Client, Context, Engine, EngineConfig, Retry, StoreError, Worker, WorkflowMisuse, step, workflow
from perdure.errors import InvalidArgument
from tests.engine.store_matrix import on_every_store

BAD_CALLS: Any = (workflow, step, Engine)  # untyped: the type checker would refuse these calls, as the tests intend
loose_workflow, loose_step, LooseEngine = BAD_CALLS


@workflow
async def anything(ctx: Context) -> None:
    pass


@step
async def some_step() -> None:
    pass


def opened(url: str) -> None:
    async def main() -> None:
        async with Engine(url):
            pass

    asyncio.run(main())


# --- stores


@pytest.mark.parametrize("kind", [Engine, Client, Worker])
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://localhost/x", "unknown store scheme 'mysql'; use one of memory://"),
        ("shop.db", "'shop.db' is not a store URL"),
        ("", "is not a store URL"),
        ("sqlite://", "names no file"),
        ("sqlite://host/x.db", "names no file"),
        ("sqlite:///:memory:", "or memory:// to store nothing"),
        ("sqlite:///x.db?colour=red", "the only option"),
        ("sqlite:///x.db?synchronous=maybe", "synchronous"),
        ("memory://name", "a memory store has no name"),
        (5, "a store must be a URL"),
        (None, "a store must be a URL"),
    ],
)
def test_invalid_store_url_is_refused(kind, url, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="(?s)" + words.replace("?", r"\?").replace("'", "['\"]?")):
        kind(url)
    assert list(tmp_path.iterdir()) == []


def test_path_in_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(StoreError, match="does not exist; create it first"):
        opened(f"sqlite:///{tmp_path}/nowhere/shop.db")
    assert list(tmp_path.iterdir()) == []


def test_path_of_a_directory_is_refused(tmp_path):
    with pytest.raises(StoreError, match="is a directory"):
        opened(f"sqlite:///{tmp_path}")


def test_read_only_file_is_refused(tmp_path, monkeypatch):
    opened(f"sqlite:///{tmp_path}/shop.db")
    file = tmp_path / "shop.db"
    file.chmod(stat.S_IREAD)
    monkeypatch.setattr("os.access", lambda *given: False)  # root may write to anything
    with pytest.raises(StoreError, match="cannot be written to; change its permissions"):
        opened(f"sqlite:///{file}")


def test_file_that_is_not_a_database_is_refused(tmp_path):
    file = tmp_path / "shop.db"
    file.write_bytes(b"these are my notes, not a database" * 100)
    with pytest.raises(StoreError, match="is not a SQLite database"):
        opened(f"sqlite:///{file}")
    assert file.read_bytes() == b"these are my notes, not a database" * 100


def test_database_of_another_program_is_refused(tmp_path):
    file = tmp_path / "shop.db"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE customers (name)")
    connection.commit()
    connection.close()
    before = file.read_bytes()
    with pytest.raises(StoreError, match="not a store of perdure"):
        opened(f"sqlite:///{file}")
    assert file.read_bytes() == before


def test_file_of_a_newer_version_is_refused(tmp_path):
    file = tmp_path / "shop.db"
    opened(f"sqlite:///{file}")
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    with pytest.raises(StoreError, match=r"schema version 999.*upgrade perdure"):
        opened(f"sqlite:///{file}")


def test_other_number_of_shards_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"
    opened(url)

    async def main() -> None:
        async with Engine(url, config=EngineConfig(shards=7)):
            pass

    with pytest.raises(StoreError, match="shards=128"):
        asyncio.run(main())


def test_engine_that_could_not_open_leaves_nothing_running_and_can_be_opened_again(tmp_path):
    async def main() -> None:
        engine = Engine(f"sqlite:///{tmp_path}/later/shop.db")
        with pytest.raises(StoreError):
            await engine.open()
        (tmp_path / "later").mkdir()
        async with engine:
            await engine.execute(anything)

    asyncio.run(main())


# --- names and ids

BAD_NAMES = [
    ("", "empty"),
    ("x" * 513, "512 is the maximum"),
    ("tab\there", "control or unprintable"),
    ("nul\x00", "control or unprintable"),
    ("line\nbreak", "control or unprintable"),
    (42, "must be a string"),
]


@pytest.mark.parametrize(("name", "words"), BAD_NAMES)
@on_every_store
async def test_invalid_run_id_is_refused(h, name, words):
    engine = await h.engine(anything)
    calls = [
        lambda: engine.start(anything, id=name),
        lambda: engine.status(name),
        lambda: engine.poll(name),
        lambda: engine.result(name),
        lambda: engine.describe(name),
        lambda: engine.history(name),
        lambda: engine.cancel(name),
        lambda: engine.terminate(name),
        lambda: engine.resume(name),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=words):
            await call()
    with pytest.raises(InvalidArgument, match=words):
        engine.get(name)
    with pytest.raises(InvalidArgument, match=words):
        await anext(aiter(engine.watch(name)))
    assert engine.faults.commits == 0
    assert (await engine.runs()).runs == ()


@on_every_store
async def test_longest_id_with_any_printable_characters_is_accepted(h):
    engine = await h.engine(anything)
    for name in ("x" * 512, "ünï cödé 漢字 🙂 %/#[]'\";--"):
        await h.run_to_end(await engine.start(anything, id=name))
        assert (await engine.describe(name)).id == name


@pytest.mark.parametrize(("name", "words"), [case for case in BAD_NAMES if case[0] != ""])
def test_invalid_name_of_a_definition_is_refused(name, words):
    with pytest.raises(InvalidArgument, match=words):
        workflow(name=name)(anything.fn)
    with pytest.raises(InvalidArgument, match=words):
        step(name=name)(some_step.fn)
    with pytest.raises(InvalidArgument, match=words):
        workflow(pool=name)
    with pytest.raises(InvalidArgument, match=words):
        Engine("memory://", pool=name)


@pytest.mark.parametrize("tags", [{"": "x"}, {"a\n": "x"}, {"a": None}, {"perdure.x": "y"}, {"a": "x" * 513}, ["a"]])
@on_every_store
async def test_invalid_tags_are_refused(h, tags):
    engine = await h.engine(anything)
    with pytest.raises(InvalidArgument, match="tag"):
        await engine.start(anything, tags=tags)
    with pytest.raises(InvalidArgument, match="tag"):
        workflow(tags=tags)
    assert engine.faults.commits == 0


# --- durations

BAD_DURATIONS = [-1, -0.001, float("nan"), float("inf"), 10**12, timedelta(seconds=-1), "1h", True]


@pytest.mark.parametrize("duration", BAD_DURATIONS)
@on_every_store
async def test_invalid_duration_of_a_call_is_refused(h, duration):
    engine = await h.engine(anything)
    with pytest.raises(InvalidArgument, match="delay"):
        await engine.start(anything, delay=duration)
    with pytest.raises(InvalidArgument, match="retention"):
        await engine.start(anything, retention=duration)
    with pytest.raises(InvalidArgument, match="timeout"):
        await engine.result("x", timeout=duration)
    assert engine.faults.commits == 0


@pytest.mark.parametrize("duration", BAD_DURATIONS)
def test_invalid_duration_of_a_definition_is_refused(duration):
    for option in ("timeout", "max_suspend", "retention"):
        with pytest.raises(InvalidArgument, match=option):
            workflow(**{option: duration})
    with pytest.raises(InvalidArgument, match="timeout"):
        step(timeout=duration)
    for option in ("initial", "max_delay"):
        with pytest.raises(InvalidArgument, match=option):
            Retry(**{option: duration})
    for option in ("lease", "sweep_interval", "timer_resolution", "event_retention", "run_retention", "grace"):
        with pytest.raises(InvalidArgument, match=f"EngineConfig.{option}"):
            EngineConfig(**{option: duration})


@on_every_store
async def test_invalid_sleep_fails_the_run_and_not_the_engine(h):
    @workflow
    async def sleeps(ctx: Context, seconds: float) -> str:
        try:
            await ctx.sleep(seconds)
        except InvalidArgument as error:
            return str(error)
        return "slept"

    engine = await h.engine(sleeps)
    assert "zero or more" in await h.run_to_end(await engine.start(sleeps, -5.0))
    assert "thousand years" in await h.run_to_end(await engine.start(sleeps, 1e12))
    assert await h.run_to_end(await engine.start(sleeps, 0.0)) == "slept"


# --- definitions


def test_workflow_that_is_not_async_is_refused():
    with pytest.raises(WorkflowMisuse, match="must be an `async def`"):

        @loose_workflow
        def blocking(ctx: Context) -> None:
            pass


def test_workflow_without_a_context_is_refused():
    with pytest.raises(WorkflowMisuse, match="must take the Context as its first parameter"):

        @loose_workflow
        async def none() -> None:
            pass

    with pytest.raises(WorkflowMisuse, match="must be the Context"):

        @loose_workflow
        async def other(n: int) -> None:
            pass

    with pytest.raises(WorkflowMisuse, match="first parameter"):

        @loose_workflow
        async def keyword(*, ctx: Context) -> None:
            pass


@pytest.mark.parametrize("version", [0, -1, "2", 1.5, True])
def test_invalid_version_is_refused(version):
    with pytest.raises(InvalidArgument, match="version"):
        loose_workflow(version=version)


def test_unknown_option_is_refused():
    with pytest.raises(InvalidArgument, match="no option colour"):
        loose_workflow(colour="red")
    with pytest.raises(InvalidArgument, match="no option colour"):
        loose_step(colour="red")
    with pytest.raises(InvalidArgument, match="retry"):
        loose_workflow(retry=3)
    with pytest.raises(InvalidArgument, match="retry"):
        loose_step(retry=3)


def test_invalid_argument_of_an_engine_is_refused():
    with pytest.raises(InvalidArgument, match="@workflow functions"):
        LooseEngine("memory://", workflows=[some_step])
    with pytest.raises(InvalidArgument, match="concurrency"):
        Worker("memory://", concurrency=0)
    with pytest.raises(InvalidArgument, match="EngineConfig"):
        LooseEngine("memory://", config={"lease": 5})


@on_every_store
async def test_unknown_queue_is_refused(h):
    engine = await h.engine(anything)
    with pytest.raises(InvalidArgument, match=r"declare WorkQueue\('fast'\)"):
        await engine.start(anything, queue="fast")
    assert not (await engine.runs()).runs
