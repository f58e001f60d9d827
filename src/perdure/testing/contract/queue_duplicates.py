"""Dedupe keys and debounced starts: what a start does when its key is taken, also racing and repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from perdure.stores.protocol import Store
from perdure.stores.results import Committed, Created, Joined, WriteResult
from perdure.stores.writes import CreateRun
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    claim_ids,
    end,
    observed,
    record,
    run,
    succeeded,
    turn,
)
from perdure.testing.contract.queue_builders import (
    admit_now,
    check_waits,
    configure,
    holders,
    leave,
    place_of,
    queued,
    waiting_ids,
)

CREATED = Created(owned=False)


def keyed(id: str = "r", on_duplicate: str = "existing", dedupe: str = "k", **fields: Any) -> CreateRun:
    """Build a start with a dedupe key; its input is named after it."""
    given = {"input": f'"{id}"'.encode(), **fields}
    return queued(id, dedupe=dedupe, on_duplicate=on_duplicate, **given)


def debounced(id: str, quiet_until: float, latest_at: float | None = None, **fields: Any) -> CreateRun:
    """Build a debounced start whose payload replaces that of the run it joins."""
    given = {"on_duplicate": "replace", "eligible_at": quiet_until, "latest_at": latest_at, **fields}
    return keyed(id, debounce=True, **given)


async def first_result(store: Store, *writes: CreateRun) -> WriteResult:
    return (await store.commit(writes))[0]


class DedupeCases(ContractCase):
    @case
    async def test_existing_and_refuse_join_a_run_that_waits_or_holds_a_slot(self, store: Store) -> None:
        await store.commit([configure(), keyed()])
        for on_duplicate in ("existing", "refuse"):
            assert await first_result(store, keyed("s", on_duplicate)) == Joined("r", replaced=False, waiting=True)
        await admit_now(store, 1)
        await claim_ids(store, claim())
        for on_duplicate in ("existing", "refuse"):
            assert await first_result(store, keyed("s", on_duplicate)) == Joined("r", replaced=False, waiting=False)
        assert await store.records(["s"]) == [None]
        assert (await record(store)).input == b'"r"'
        await store.commit([turn(0, patch=succeeded())])
        assert await first_result(store, keyed("s")) == CREATED, "the key is free when the run has ended"

    @case
    async def test_replace_gives_a_waiting_run_the_payload_and_keeps_its_place(self, store: Store) -> None:
        await store.commit([configure(), keyed(tags={"team": "a"}, deadline_at=900.0), keyed("next", dedupe="other")])
        before, place = await record(store), await place_of(store)
        write = keyed(
            "s",
            "replace",
            workflow="flow2",
            version=3,
            pool="gpu",
            created_at=130.0,
            tags={},
            priority=9,
            partition="z",
        )
        assert await first_result(store, write) == Joined("r", replaced=True, waiting=True)
        after = await record(store)
        assert (after.workflow, after.version, after.pool, after.input) == ("flow2", 3, "gpu", b'"s"')
        assert (after.tags, after.deadline_at, after.created_at, after.created_by) == (
            before.tags,
            900.0,
            100.0,
            before.created_by,
        )
        assert await place_of(store) == place
        await check_waits(store)
        assert await admit_now(store, 1, serves=(("flow2", 3, "gpu"),)) == ["r"]
        assert await claim_ids(store, claim(workflows=(("flow2", 3),), pool="gpu")) == ["r"]

    @case
    async def test_replace_waits_as_a_new_run_behind_an_admitted_one(self, store: Store) -> None:
        await store.commit([configure(), keyed("r0", "replace")])
        await admit_now(store, 1)
        assert await first_result(store, keyed("r1", "replace")) == CREATED
        assert await first_result(store, keyed("r2", "replace")) == Joined("r1", replaced=True, waiting=True)
        assert (await holders(store), await waiting_ids(store)) == (["r0"], ["r1"])
        assert await first_result(store, keyed("r3")) == Joined("r1", replaced=False, waiting=True), (
            "the one that waits"
        )
        await admit_now(store, 1)
        assert await first_result(store, keyed("r3")) == Joined("r1", replaced=False, waiting=False), "the latest"
        await store.commit([end(id="r1")])
        assert await first_result(store, keyed("r3")) == Joined("r0", replaced=False, waiting=False)

    @case
    async def test_replace_keeps_a_delayed_run_delayed(self, store: Store) -> None:
        await store.commit([configure(), keyed(eligible_at=300.0)])
        assert await first_result(store, keyed("s", "replace")) == Joined("r", replaced=True)
        assert (await place_of(store)).eligible_at == 300.0

    @case
    async def test_a_key_belongs_to_its_queue(self, store: Store) -> None:
        await store.commit([configure(), configure("other"), keyed(partition="x")])
        assert await first_result(store, keyed("s", queue="other")) == CREATED
        assert await first_result(store, keyed("t", partition="y", priority=-1)) == Joined("r")
        assert await first_result(store, keyed("t", dedupe="K")) == CREATED
        assert await first_result(store, queued("u")) == CREATED

    @case
    async def test_an_end_or_leaving_frees_the_key(self, store: Store) -> None:
        await store.commit([configure(), keyed("r0"), end(id="r0"), keyed("r1"), leave("r1", "q", 150.0)])
        assert await first_result(store, keyed("r2")) == CREATED
        assert await waiting_ids(store) == ["r2"]

    @case
    async def test_two_starts_of_one_key_in_a_batch_are_applied_one_by_one(self, store: Store) -> None:
        results = await store.commit([configure(), keyed("r0"), keyed("r1"), end(id="r0"), keyed("r2"), keyed("r3")])
        assert results == [
            Committed(version=1),
            CREATED,
            Joined("r0"),
            Committed(),
            CREATED,
            Joined("r2"),
        ]

    @case
    async def test_replacements_in_one_batch_keep_the_last_payload(self, store: Store) -> None:
        await store.commit([configure(), *(keyed(f"r{n}", "replace") for n in range(5))])
        assert ((await record(store, "r0")).input, await waiting_ids(store)) == (b'"r4"', ["r0"])

    @case
    async def test_a_joined_start_observes_and_creates_nothing(self, store: Store) -> None:
        await store.commit([configure(), keyed()])
        assert await first_result(store, observed(keyed("s"))) == Joined("r")
        assert await store.commit([end()]) == [Committed()]
        assert await store.unfinalized() == []

    @case
    async def test_racing_starts_of_one_key_create_one_run(self, store: Store) -> None:
        await store.commit([configure()])
        handles = (store, await self.second(store))
        for on_duplicate in ("existing", "refuse", "replace"):
            ids = [f"{on_duplicate}{n:02}" for n in range(24)]
            calls = [handles[n % 2].commit([keyed(id, on_duplicate, dedupe=on_duplicate)]) for n, id in enumerate(ids)]
            results = [result for (result,) in await asyncio.gather(*calls)]
            (winner,) = [id for id, result in zip(ids, results, strict=True) if result == CREATED]
            joined = Joined(winner, replaced=on_duplicate == "replace", waiting=True)
            assert results == [CREATED if id == winner else joined for id in ids]
            assert [row is not None for row in await store.records(ids)] == [id == winner for id in ids]

    @case
    async def test_racing_starts_ends_and_admissions_leave_at_most_one_waiting_run_per_key(self, store: Store) -> None:
        await store.commit([configure()])
        handles = (store, await self.second(store))

        async def start(n: int) -> None:
            for i in range(12):
                await handles[n % 2].commit([keyed(f"r{n}-{i:02}", ("existing", "replace")[n % 2])])
                assert len(await handles[n % 2].places("q")) <= 1

        async def end_or_admit(n: int) -> None:
            for i in range(12):
                for place in await store.places("q", held=i % 2 == 0):
                    await handles[n % 2].commit([end(f"end-{n}-{i}", id=place.run_id)])
                view = await store.queue_view("q", 200.0)
                if view is not None and n == 0:
                    await admit_now(store, 1)

        await asyncio.gather(*(start(n) for n in range(4)), *(end_or_admit(n) for n in range(2)))
        open_runs = await waiting_ids(store) + await holders(store)
        rows = await store.records(open_runs)
        assert all(row is not None and not getattr(row, "ended_at", None) for row in rows)

    @case
    async def test_a_repeated_join_finds_its_place_again_also_after_admission(self, store: Store) -> None:
        await store.commit([configure(), keyed("r0", "replace")])
        write = keyed("r1", "replace")
        assert await first_result(store, write) == Joined("r0", replaced=True, waiting=True)
        assert await first_result(store, write) == Joined("r0", replaced=True, waiting=True)
        await admit_now(store, 1)
        assert await first_result(store, write) == Joined("r0", replaced=True, waiting=False)
        assert await waiting_ids(store) == []
        assert await first_result(store, keyed("r2", "replace")) == CREATED
        assert await first_result(store, write) == Joined("r0", replaced=True, waiting=False)

    @case
    async def test_a_repeated_start_finds_its_own_run_not_its_key(self, store: Store) -> None:
        await store.commit([configure(), keyed("r0", "replace"), keyed("r1", "replace")])
        assert await first_result(store, keyed("r0", "replace")) == CREATED
        assert (await record(store, "r0")).input == b'"r1"', "it does not replace the later payload"

    @case
    async def test_a_repeated_join_does_not_undo_a_later_one_of_another_place(self, store: Store) -> None:
        await store.commit([configure(), keyed("r0", "replace"), keyed("r1", "replace")])
        before = await record(store, "r0")
        assert await first_result(store, keyed("r1", "replace", input=b'"r1"')) == Joined("r0", replaced=True)
        assert await record(store, "r0") == before

    @case
    async def test_a_plain_run_does_not_take_a_key(self, store: Store) -> None:
        await store.commit([configure(), run(), keyed("s")])
        assert await waiting_ids(store) == ["s"]


class DebounceCases(ContractCase):
    @case
    async def test_each_start_delays_the_run_and_replaces_its_payload_up_to_the_latest_time(self, store: Store) -> None:
        await store.commit([configure(), debounced("r0", 105.0, 112.0)])
        for n, (quiet, expected) in enumerate([(108.0, 108.0), (111.0, 111.0), (114.0, 112.0), (117.0, 112.0)], 1):
            result = await first_result(store, debounced(f"r{n}", quiet, 999.0))
            assert result == Joined("r0", replaced=True, waiting=True)
            assert ((await place_of(store, "r0")).eligible_at, (await record(store, "r0")).input) == (
                expected,
                f'"r{n}"'.encode(),
            )
            await check_waits(store, "r0")
        assert await admit_now(store, 1, promote=1, now=111.9) == []
        assert await admit_now(store, 1, promote=1, now=112.0) == ["r0"]
        assert (await record(store, "r0")).input == b'"r4"'

    @case
    async def test_the_first_payload_can_be_kept(self, store: Store) -> None:
        await store.commit([configure(), debounced("r0", 105.0, 120.0, on_duplicate="existing")])
        result = await first_result(store, debounced("r1", 108.0, 120.0, on_duplicate="existing"))
        assert result == Joined("r0", replaced=False, waiting=True)
        assert ((await place_of(store, "r0")).eligible_at, (await record(store, "r0")).input) == (108.0, b'"r0"')

    @case
    async def test_admission_frees_the_key_of_a_debounced_run(self, store: Store) -> None:
        await store.commit([configure(), debounced("r0", 105.0, on_duplicate="existing")])
        assert await admit_now(store, 1, promote=1) == ["r0"]
        assert await first_result(store, debounced("r1", 305.0, on_duplicate="existing")) == CREATED
        assert await first_result(store, debounced("r2", 310.0)) == Joined("r1", replaced=True)
        assert await waiting_ids(store) == ["r1"]

    @case
    async def test_a_promoted_run_takes_the_payload_and_keeps_its_place(self, store: Store) -> None:
        await store.commit([configure(), debounced("r0", 105.0), queued("next")])
        assert await admit_now(store, promote=1) == []
        place = await place_of(store, "r0")
        assert await first_result(store, debounced("r1", 300.0)) == Joined("r0", replaced=True)
        assert (await place_of(store, "r0"), (await record(store, "r0")).input) == (place, b'"r1"')

    @case
    async def test_a_repeated_debounced_start_does_not_delay_the_run_again(self, store: Store) -> None:
        await store.commit([configure(), debounced("r0", 105.0)])
        write = debounced("r1", 110.0)
        assert await store.commit([write, debounced("r2", 108.0)]) == [Joined("r0", True), Joined("r0", True)]
        assert (await place_of(store, "r0")).eligible_at == 108.0
        last = debounced("r2", 108.0)
        await admit_now(store, 1, promote=1)
        assert await first_result(store, last) == Joined("r0", replaced=True, waiting=False)

    @case
    async def test_racing_debounced_starts_share_one_run(self, store: Store) -> None:
        await store.commit([configure()])
        handles = (store, await self.second(store))
        calls = [handles[n % 2].commit([debounced(f"r{n:02}", 105.0 + n, 110.0)]) for n in range(24)]
        results: Sequence[WriteResult] = [result for (result,) in await asyncio.gather(*calls)]
        assert results.count(CREATED) == 1
        (winner,) = await waiting_ids(store)
        assert all(result in (CREATED, Joined(winner, replaced=True)) for result in results)
