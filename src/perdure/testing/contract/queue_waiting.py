"""The waiting rule: while a run waits in a queue, no write makes it due or gives it an owner."""

from __future__ import annotations

from perdure.model.records import RunStatus, StreamItem
from perdure.stores.protocol import Store
from perdure.stores.results import Committed, MessageDelivered, ObserverAdded, Superseded, WriteResult
from perdure.stores.writes import AppendStream, ReleaseRun, RunPatch, SupersedeStream, TagRun, Write
from perdure.testing.contract.builders import (
    ContractCase,
    case,
    claim,
    claim_ids,
    deliver,
    end,
    entry,
    load,
    observe,
    record,
    succeeded,
    suspended,
    turn,
)
from perdure.testing.contract.queue_builders import (
    admit_now,
    check_has_no_place,
    check_waits,
    configure,
    leave,
    move,
    place_of,
    queued,
    requeue_ended,
    waiting_ids,
)

MESSAGE_KINDS = ("event", "child", "deferred", "cancel", "resume", "pause", "cancel", "pause", "resume")


def writes_to_waiting_run(base: int) -> list[tuple[Write, type[WriteResult]]]:
    """Return writes about the waiting run "r" at this position that leave it waiting, each with its result."""
    item = StreamItem(stream="s", value=b"1", location="step", at=1.0, writer="w")
    return [
        *((deliver(f"m{n}", kind=kind), MessageDelivered) for n, kind in enumerate(MESSAGE_KINDS)),
        (observe(), ObserverAdded),
        (ReleaseRun(run_id="r", worker="a", now=190.0), Committed),
        (TagRun(run_id="r", tags={"team": "a"}), Committed),
        (SupersedeStream(run_id="r", location="step", writer="w"), Committed),
        (AppendStream(run_id="r", worker="a", items=(item,)), Superseded),
        (move("r", "q", 0), Committed),
        (turn(base, entry("x"), turn_id="t1"), Superseded),
        (turn(base, entry("x"), turn_id="t2", owned=False), Superseded),
        (turn(base, turn_id="t3", owned=False, patch=suspended(190.0)), Superseded),
        (turn(base, turn_id="t4", owned=False, patch=RunPatch(status=RunStatus.RUNNING, owner="a")), Superseded),
        (turn(base, turn_id="t5", owned=False, patch=succeeded()), Superseded),
        (requeue_ended(base, "t6"), Committed),
    ]


async def check_nothing_makes_it_due(store: Store) -> None:
    base = (await load(store)).position
    for write, expected in writes_to_waiting_run(base):
        (result,) = await store.commit([write])
        assert isinstance(result, expected), (write, result)
        await check_waits(store)
        assert await store.retry_held([("flow", 1)], "paused", 195.0) == 0
        assert await store.release_runs("a", 195.0, recovered=False) == []
        await check_waits(store)
        assert await store.next_wake("default") is None
        assert await claim_ids(store, claim(now=1e9, gates=(("q", 9),))) == []


class QueueWaitingCases(ContractCase):
    @case
    async def test_no_write_makes_a_new_waiting_run_due(self, store: Store) -> None:
        await store.commit([configure(), queued()])
        await check_nothing_makes_it_due(store)
        assert await admit_now(store, 1) == ["r"]
        assert await claim_ids(store, claim()) == ["r"]
        assert [message.id for message in await store.inbox("r")] == [f"m{n}" for n in range(len(MESSAGE_KINDS))]

    @case
    async def test_no_write_makes_a_rewound_waiting_run_due(self, store: Store) -> None:
        await store.commit([configure(), queued()])
        await admit_now(store, 1)
        await claim_ids(store, claim())
        await store.commit([turn(0, entry(), patch=succeeded()), requeue_ended(1)])
        await check_nothing_makes_it_due(store)
        assert await admit_now(store, 1) == ["r"]

    @case
    async def test_no_write_makes_a_delayed_or_promoted_run_due(self, store: Store) -> None:
        await store.commit([configure(), queued(eligible_at=150.0)])
        await check_nothing_makes_it_due(store)
        assert await admit_now(store, promote=1) == []
        await check_waits(store)
        await store.commit([deliver("more")])
        await check_waits(store)
        assert await admit_now(store, 1) == ["r"]

    @case
    async def test_a_pause_holds_a_waiting_run_and_a_resume_or_cancel_ends_the_hold(self, store: Store) -> None:
        await store.commit([configure(), queued()])
        for kind in ("resume", "cancel"):
            await store.commit([deliver(f"pause-{kind}", kind="pause"), deliver(f"event-{kind}")])
            held = (await record(store)).held
            assert held is not None
            assert (held.kind, held.reason) == ("paused", "paused while it waits in its queue")
            assert await admit_now(store, 1) == []
            await store.commit([deliver(f"end-{kind}", kind=kind)])
            assert (await record(store)).held is None
        assert await admit_now(store, 1) == ["r"]

    @case
    async def test_a_repeated_pause_does_not_hold_the_run_again(self, store: Store) -> None:
        await store.commit([configure(), queued()])
        pause, resume = deliver("p", kind="pause"), deliver("s", kind="resume")
        await store.commit([pause, resume, pause])
        assert (await record(store)).held is None

    @case
    async def test_messages_to_a_run_with_a_slot_follow_the_common_rules(self, store: Store) -> None:
        await store.commit([configure(), queued()])
        await admit_now(store, 1)
        await store.commit([deliver("p", kind="pause")])
        assert (await record(store)).held is None
        await claim_ids(store, claim())
        await store.commit([turn(0, seen=1, patch=suspended(900.0))])
        await store.commit([deliver("m", now=250.0)])
        assert (await record(store)).wake_at == 250.0

    @case
    async def test_a_paused_run_that_leaves_its_queue_is_due_and_not_held(self, store: Store) -> None:
        await store.commit([configure(), queued(), deliver("p", kind="pause"), leave("r", "q", 150.0)])
        await check_has_no_place(store)
        row = await record(store)
        assert (row.held, row.wake_at) == (None, 150.0)
        assert [message.kind for message in await store.inbox("r")] == ["pause"], "it holds itself when it executes"

    @case
    async def test_a_paused_run_that_waits_can_be_ended(self, store: Store) -> None:
        await store.commit([configure(), queued(), deliver("p", kind="pause"), end(only_if_not_started=True)])
        await check_has_no_place(store)
        assert (await record(store)).held is None

    @case
    async def test_unread_messages_of_a_waiting_run_are_numbered_and_seen_after_admission(self, store: Store) -> None:
        await store.commit([configure(), queued(), deliver("m1"), deliver("m2")])
        assert (await record(store)).last_message_no == 2
        await admit_now(store, 1)
        (claimed,) = await store.claim(claim())
        assert (claimed.id, claimed.last_message_no) == ("r", 2)
        assert await store.commit([turn(0, patch=suspended(None), seen=1)]) == [Committed(has_messages=True)]
        assert (await record(store)).wake_at is not None

    @case
    async def test_a_waiting_run_of_a_fenced_worker_waits(self, store: Store) -> None:
        await store.commit([configure(), queued(owner="a")])
        await store.fence_worker("a")
        assert await store.release_runs("a", 150.0, recovered=True) == []
        await check_waits(store)
        assert ((await place_of(store)).run_id, await waiting_ids(store)) == ("r", ["r"])
