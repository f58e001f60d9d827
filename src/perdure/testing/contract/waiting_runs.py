"""Suspended runs are selected by what they wait for, in pages."""

from __future__ import annotations

from perdure.model.queries import RunQuery
from perdure.model.records import Hold, RunStatus, Wait
from perdure.stores.protocol import Store
from perdure.stores.writes import RunPatch, Write
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    end,
    observe,
    publish,
    receive,
    run,
    suspended,
    turn,
)


def waits_for(id: str, *waits: Wait, created_at: float = 100.0, held: Hold | None = None) -> list[Write]:
    """Build a new run that is suspended with these waits; it subscribes to the events among them."""
    patch = suspended(waits=waits, held=held)
    topics = tuple(name for wait in waits if wait.kind == "event" for name in (wait.name or "").split(","))
    create = run(id, owner="a", created_at=created_at)
    return [create, receive(0, *topics, id=id, patch=patch) if topics else turn(0, id=id, patch=patch)]


async def selected(store: Store, waiting_for: str, **fields: object) -> list[str]:
    page = await store.runs(RunQuery(waiting_for=waiting_for, **fields))  # type: ignore[arg-type]
    assert page.next is None
    return [each.id for each in page.runs]


class WaitingRunCases(ContractCase):
    @case
    async def test_runs_are_selected_by_kind_and_name_of_a_wait(self, store: Store) -> None:
        await store.commit(waits_for("e1", Wait("event", "x", "paid"), Wait("timer", "~timer", None, 500.0)))
        await store.commit(waits_for("e2", Wait("event", "x", "paid,refused"), created_at=101.0))
        await store.commit(waits_for("d", Wait("deferred", "review", "review")))
        await store.commit(waits_for("t", Wait("timer", "sleep", None, 500.0)))
        await store.commit(waits_for("a", Wait("retry", "charge", "charge", 500.0)))
        await store.commit([run("child"), *waits_for("c", Wait("child", "w", "child")), observe("c", id="child")])
        await store.commit([run("new")])
        expected = {
            "event": ["e2", "e1"],
            "event:paid": ["e2", "e1"],
            "event:refused": ["e2"],
            "event:pai": [],
            "event:paid,refused": [],
            "deferred": ["d"],
            "deferred:review": ["d"],
            "deferred:paid": [],
            "timer": ["t", "e1"],
            "retry": ["a"],
            "retry:charge": ["a"],
            "child": ["c"],
            "child:child": ["c"],
            "child:c": [],
            "held": [],
        }
        for waiting_for, ids in expected.items():
            assert await selected(store, waiting_for) == ids, waiting_for

    @case
    async def test_held_runs_are_selected_by_kind(self, store: Store) -> None:
        await store.commit(waits_for("r1", Wait("held", name="why"), held=Hold("paused", "why")))
        await store.commit(waits_for("r2", Wait("held", name="why"), held=Hold("diverged", "why")))
        assert await selected(store, "held") == ["r2", "r1"]
        assert await selected(store, "held:paused") == ["r1"]
        assert await selected(store, "held", held="diverged") == ["r2"]

    @case
    async def test_only_suspended_runs_wait(self, store: Store) -> None:
        for n in range(4):
            await store.commit(waits_for(f"r{n}", Wait("event", "x", "t"), created_at=100.0 + n))
        await store.commit([end(id="r0"), publish()])  # the oldest subscription gets the event: r1
        await store.claim(claim(limit=1))
        assert await selected(store, "event:t") == ["r3", "r2"]
        assert await selected(store, "event:other") == []

    @case
    async def test_waits_are_combined_with_other_filters(self, store: Store) -> None:
        await store.commit(waits_for("r1", Wait("event", "x", "t")))
        await store.commit([run("above", owner="a"), run("r2", owner="a", parent="above", tags={"k": "v"})])
        await store.commit([receive(0, "t", id="r2", patch=suspended(waits=(Wait("event", "x", "t"),)))])
        assert await selected(store, "event:t", parent="above") == ["r2"]
        assert await selected(store, "event:t", tags={"k": "v"}) == ["r2"]
        assert await selected(store, "event:t", id_prefix="r1") == ["r1"]
        assert await selected(store, "event:t", status=RunStatus.SUSPENDED) == ["r2", "r1"]
        assert await selected(store, "event:t", status=RunStatus.RUNNING) == []
        assert await selected(store, "event:t", workflow="other") == []
        assert await selected(store, "event:t", created_after=101.0) == []
        assert await selected(store, "event:t", created_before=101.0) == ["r2", "r1"]

    @case
    async def test_pages_have_no_gaps_or_repeats(self, store: Store) -> None:
        for n in range(7):
            created_at = 100.0 + n // 2
            await store.commit(waits_for(f"e{n}", Wait("event", "x", "t"), created_at=created_at))
            await store.commit(waits_for(f"d{n}", Wait("deferred", "x", "t"), created_at=created_at))
            await store.commit(waits_for(f"o{n}", Wait("event", "x", "other"), created_at=created_at))
        for waiting_for, letter in (("event:t", "e"), ("deferred:t", "d")):
            found, after = [], None
            while True:
                page = await store.runs(RunQuery(waiting_for=waiting_for, limit=2, after=after))
                found += [each.id for each in page.runs]
                if (after := page.next) is None:
                    break
                assert len(page.runs) == 2
            assert found == [f"{letter}{n}" for n in range(6, -1, -1)]

    @case
    async def test_a_run_that_continues_is_not_listed(self, store: Store) -> None:
        await store.commit(waits_for("r", Wait("deferred", "x", "d")))
        await store.commit([turn(1, owned=False, id="r", patch=RunPatch(status=RunStatus.RUNNING, wake_at=1.0))])
        assert await selected(store, "deferred:d") == []
