"""The short way of plain writes: it leaves what the long way leaves, and leaves to that whatever is not plain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from perdure.records import ErrorRecord, RunStatus, TurnExtras, Wait
from perdure.store import postgres_plainly
from perdure.store.base import Answer, Claim, Committed, Created, CreateRun, Exists, Restart, RunPatch, Write
from perdure.store.postgres import PostgresStore
from perdure.store.postgres_link import sql, target_of
from perdure.testing.contract.kit import (
    claim,
    end,
    entry,
    mail,
    observe,
    observed,
    receive,
    record,
    run,
    settle,
    succeeded,
    suspended,
    turn,
    worker,
)
from tests.servers.postgres import postgres_url, schema_of_its_own
from tests.store.test_postgres import WAITS_FOR_A_LOCK, ask, halfway, named, on

__all__ = ["postgres_url"]  # a fixture

ANEW = Restart(workflow="flow", version=1, input=b"{}", begun_at=None)
FAILED = ErrorRecord("builtins.ValueError", "no \0 way", location="charge")

PLAIN: dict[str, Write] = {
    "a new run": run("new", owner="a", parent="p", attached=True, tags={"team": "a"}, deadline_at=500.0, retention=9.0),
    "a step": turn(0, entry(seq=1, started_at=101.0, settled_at=102.0, fingerprint=b"f", detail=b"d", ordinal=3)),
    "a step that failed": turn(0, entry(value=None, error=FAILED, attempts=3)),
    "the end": turn(0, entry(), patch=succeeded(prune_at=900.0, drift=("charge",), recoveries=2)),
    "a bad end": turn(0, entry(), patch=RunPatch(status=RunStatus.FAILED, error=FAILED, ended_at=1.0)),
}

NOT_PLAIN: dict[str, Write] = {
    "a new run of nobody": run("new"),
    "a new run that is observed": observed(run("new", owner="a")),
    "a fork": CreateRun(run("new", owner="a").record, entries=(entry(),)),
    "a turn without entries": turn(0, patch=succeeded()),
    "a turn of two": turn(0, entry("x"), entry("y", 1)),
    "a turn of whoever has it": turn(0, entry(), owned=False),
    "a turn that suspends its run": turn(0, entry(), patch=suspended(500.0)),
    "a turn that has read mail": turn(0, entry(), seen=1, consumed=(1,)),
    "an end of who has had mail": turn(0, entry(), seen=1, patch=succeeded()),
    "a turn that begins anew": turn(0, entry(), restart=ANEW),
    "a turn that shows something": turn(0, entry(), extras=TurnExtras(dropped=("x",))),
    "mail": mail(),
}

# What was before a plain write, and the plain write.
SITUATIONS: dict[str, tuple[Sequence[Write | Claim], Write]] = {
    **{what: ((), write) for what, write in PLAIN.items()},
    "an id that is taken": ((), run(owner="a", created_by="another")),
    "a new run once more": ((), run(owner="a")),
    "a new run of a worker that is gone": ((), run("new", owner="b")),
    "a new run of a worker that nobody knows": ((), run("new", owner="nobody")),
    "a turn once more": ((turn(0, entry()),), turn(0, entry())),
    "an end once more": ((turn(0, entry(), patch=succeeded()),), turn(0, entry(), patch=succeeded())),
    "a turn after the end": ((end(),), turn(0, entry())),
    "a turn from too early": ((turn(0, entry()),), turn(0, entry("late"), turn_id="late")),
    "a turn from too late": ((), turn(3, entry())),
    "a turn of a run that is not there": ((), turn(0, entry(), id="missing")),
    "a turn of another's run": ((), turn(0, entry(), worker="b")),
    "a turn of a run that nobody has": ((turn(0, entry(), patch=suspended(500.0)),), turn(1, entry())),
    "a turn of a worker that is gone": ((run("theirs", owner="b"),), turn(0, entry(), id="theirs", worker="b")),
    "a turn from before its run began anew": (
        (
            turn(0, entry(), restart=ANEW, patch=RunPatch(status=RunStatus.RUNNING, wake_at=300.0)),
            claim(now=400.0),
        ),
        turn(0, entry("late"), turn_id="late"),
    ),
    "a turn with mail that it has not seen": ((mail(),), turn(0, entry())),
    "a turn with mail that it has seen": ((mail(),), turn(0, entry(), seen=1)),
    "an end with mail that it has not seen": ((mail(),), turn(0, entry(), patch=succeeded())),
    "an end with mail that it has seen": ((mail(),), turn(0, entry(), seen=1, patch=succeeded())),
    "a turn that has not seen what came before its run was claimed": (
        (turn(0, entry(), patch=suspended()), mail(), claim(now=400.0)),
        turn(1, entry("next", 1)),
    ),
    "an end of who was to be woken": (
        (turn(0, entry(), patch=RunPatch(status=RunStatus.RUNNING, owner="a", wake_at=500.0)),),
        turn(1, entry("next", 1), patch=succeeded()),
    ),
    "an end of who has waited": (
        (turn(0, entry(), patch=suspended(300.0, waits=(Wait("timer", until=300.0),), drift=("x",))), claim(now=400.0)),
        turn(1, entry("next", 1), patch=succeeded()),
    ),
    "an end that somebody waits for": ((observe(),), turn(0, entry(), patch=succeeded())),
    "an end of who waits for an event": ((receive(0, "t", patch=None),), turn(1, entry(), patch=succeeded())),
}

ROWS = (
    "SELECT to_jsonb(r) - 'no' FROM {schema}.runs r ORDER BY r.id",
    "SELECT r.id, to_jsonb(e) - 'run_no' FROM {schema}.entries e LEFT JOIN {schema}.runs r ON r.no = e.run_no"
    " ORDER BY r.id, e.position",
    "SELECT r.id, s.target FROM {schema}.subscriptions s LEFT JOIN {schema}.runs r ON r.no = s.run_no ORDER BY s.no",
    "SELECT r.id, o.observer FROM {schema}.observers o LEFT JOIN {schema}.runs r ON r.no = o.run_no ORDER BY r.id",
)


class Heard(PostgresStore):
    """Keeps the names of the functions that it calls."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.called: list[str] = []

    async def commit(self, batch: Sequence[Write]) -> list[Answer]:
        self.called.clear()
        link, fetch = self._open, self._open.fetch

        async def heard(text: str, *values: Any) -> Any:
            if "pg_notify" not in text:
                self.called.append(text.partition("(")[0].rpartition(".")[2])
            return await fetch(text, *values)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(link, "fetch", heard)
            return await super().commit(batch)


def play(before: Sequence[Write | Claim], write: Write) -> tuple[list[Answer], list[Any], list[str]]:
    """The answer to a write, what it has left and told, and the functions that it called. Worker "b" is gone."""

    async def life(url: str) -> tuple[list[Answer], list[Any], list[str]]:
        store = Heard(url)
        await store.open(shards=16)
        try:
            await store.join(worker("a"))
            await store.join(worker("b"))
            for each in (run(owner="a"), *before):
                await (store.claim(each) if isinstance(each, Claim) else store.commit([each]))
            await store.declare_gone("b")
            told: list[Any] = []
            store.on_change(told.append)
            answers = await store.commit([write])
            left = [await ask(url, rows) for rows in ROWS]
            return answers, [*left, told], store.called
        finally:
            await store.close()

    with schema_of_its_own() as url:
        return asyncio.run(life(url))


@pytest.mark.parametrize("what", SITUATIONS)
def test_answers_and_rows_are_those_of_the_long_way(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = SITUATIONS[what]
    plainly = play(before, write)
    monkeypatch.setattr(postgres_plainly, "call", lambda write: None)
    at_length = play(before, write)
    assert plainly[:2] == at_length[:2]


@pytest.mark.parametrize("what", PLAIN)
def test_what_is_plain_is_one_statement(what: str) -> None:
    _, _, called = play((), PLAIN[what])
    assert called == ["create_plainly" if isinstance(PLAIN[what], CreateRun) else "turn_plainly"]


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_what_is_not_is_not_tried(what: str) -> None:
    _, _, called = play((), NOT_PLAIN[what])
    assert called == ["commit_write"]


@pytest.mark.parametrize(
    ("first", "answer"), [(observe(), Committed()), (mail(), Committed(mail=True))], ids=["observed", "mailed"]
)
def test_an_end_waits_for_what_is_happening_to_its_run_and_then_knows_of_it(
    postgres_url: str, first: Write, answer: Answer
) -> None:
    async def test(store: PostgresStore) -> None:
        async with halfway(postgres_url, [first]):
            ending = asyncio.ensure_future(store.commit([turn(0, entry(), patch=succeeded())]))
            while not await ask(postgres_url, WAITS_FOR_A_LOCK, "ending"):
                assert not ending.done(), "it must wait for whoever has the run"
        assert await ending == [answer]
        assert [each.record.id for each in await store.unsettled()] == ["r"], (
            "somebody is still to be told, or mail to be dealt with"
        )
        await store.commit([settle()])

    on(named(postgres_url, "ending"), test)


def test_two_who_make_one_run_are_told_who_did(postgres_url: str) -> None:
    async def test(store: PostgresStore) -> None:
        async with halfway(postgres_url, [run("new", owner="a", created_by="first")]):
            making = asyncio.ensure_future(store.commit([run("new", owner="a", created_by="second")]))
            while not await ask(postgres_url, WAITS_FOR_A_LOCK, "making"):
                assert not making.done(), "it must wait for who was first"
        assert await making == [Exists(await record(store, "new"))]
        assert await store.commit([run("new", owner="a", created_by="first")]) == [Created(owned=True)]

    on(named(postgres_url, "making"), test)


@pytest.mark.parametrize(("before", "seen"), [(observe(), 0), (mail(), 1)], ids=["observed", "mailed"])
def test_a_run_that_owes_something_at_its_end_is_not_even_locked(postgres_url: str, before: Write, seen: int) -> None:
    """A lock is written, and would have to reach the disk, only to let the long way begin."""

    async def test(store: PostgresStore) -> None:
        await store.commit([before])
        await store.commit([turn(0, entry("first"), seen=seen)])
        plain = postgres_plainly.call(turn(1, entry("last", 1), patch=succeeded()))
        assert plain is not None
        given = (*plain.given[:3], seen, *plain.given[4:])
        connection = await asyncpg.connect(target_of(postgres_url).dsn)
        async with connection.transaction():
            statement = sql(plain.statement, target_of(postgres_url))
            assert await connection.fetchval(statement, *given) is False
            assert await connection.fetchval("SELECT pg_current_xact_id_if_assigned()") is None
        await connection.close()

    on(postgres_url, test)
