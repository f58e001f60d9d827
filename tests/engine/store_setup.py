"""Create runs directly in the store, in states that no workflow of this process would produce."""

from typing import Any

from perdure.model.records import Message, RunRecord, RunResult, RunStatus, Subscription, WorkerRecord
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Store
from perdure.stores.results import Snapshot
from perdure.stores.writes import CommitTurn, CreateRun, DeliverMessage, ObserveRunEnd, RunPatch
from perdure.testing import Harness, VirtualClock

ELSEWHERE = "elsewhere"
"""The worker that the runs made here belong to; it lives for as long as a test needs it."""


class Stage:
    """Makes runs of a workflow that no engine of the test has."""

    def __init__(self, harness: Harness) -> None:
        self.store: Store = harness.faulty()
        self.clock: VirtualClock = harness.clock
        self._config = harness.config
        self._set = False

    async def run(self, id: str, *, has_executed: bool = True, **fields: Any) -> None:
        """Create a suspended run without a wait, or one that never executed."""
        await self._set_up()
        if has_executed:
            fields = {"owner": ELSEWHERE, "status": RunStatus.RUNNING, "first_executed_at": self.clock.now(), **fields}
        await self.store.commit([CreateRun(self.record(id, **fields))])
        if has_executed:
            await self.turn(id, patch=RunPatch(status=RunStatus.SUSPENDED))

    async def waiting(self, id: str, *topics: str, target: str = "0/receive", **fields: Any) -> None:
        """Create a run that is suspended in a receive from these topics."""
        extras = TurnExtras(subscribe=(Subscription(target, topics),))
        await self.run(id, has_executed=False, **fields)
        await self.turn(id, patch=RunPatch(status=RunStatus.SUSPENDED), extras=extras)

    async def end(self, id: str, status: RunStatus = RunStatus.SUCCEEDED, **fields: Any) -> None:
        given: dict[str, Any] = {"result": b'"done"'} if status is RunStatus.SUCCEEDED else {}
        patch = RunPatch(status=status, ended_at=self.clock.now(), **{**given, **fields})
        await self.turn(id, patch=patch)

    async def _set_up(self) -> None:
        if not self._set:
            self._set = True
            await self.store.open(shards=self._config.shards)
            now = self.clock.now()
            worker = WorkerRecord(id=ELSEWHERE, pool="there", workflows=(), lease_until=now + 1e6, started_at=now)
            assert await self.store.join(worker)

    async def turn(self, id: str, **fields: Any) -> None:
        (snapshot,) = await self.store.load([id])
        assert isinstance(snapshot, Snapshot)
        base = snapshot.position
        turn = CommitTurn(
            run_id=id,
            base=base,
            turn_id=f"{ELSEWHERE}/{id}/{base}",
            worker=ELSEWHERE,
            owned=False,
            now=self.clock.now(),
            seen=snapshot.record.last_message_no,
            **fields,
        )
        (answer,) = await self.store.commit([turn])
        assert type(answer).__name__ == "Committed", answer

    async def observe(self, id: str, observer: str, target: str = "0/child") -> None:
        await self.store.commit([ObserveRunEnd(run_id=id, observer=observer, target=target)])

    async def deliver(self, id: str, message: Message) -> None:
        await self.store.commit([DeliverMessage(run_id=id, message=message, now=self.clock.now())])

    def record(self, id: str, **fields: Any) -> RunRecord:
        now = self.clock.now()
        given: dict[str, Any] = {
            "workflow": "staged",
            "version": 1,
            "input": b"{}",
            "created_at": now,
            "created_by": f"stage-{id}",
            "seed": 7,
            "wake_at": now,
        }
        return RunRecord(id=id, **{**given, **fields})

    async def row(self, id: str) -> RunRecord:
        (found,) = await self.store.records([id])
        assert isinstance(found, RunRecord)
        return found

    async def inbox(self, id: str) -> list[tuple[str, str, bytes | None]]:
        """Return (kind, name, body) of the unread messages of a run."""
        return [(each.kind, each.name, each.body) for each in await self.store.inbox(id)]


SUCCEEDED = RunResult(RunStatus.SUCCEEDED, b'"done"')
