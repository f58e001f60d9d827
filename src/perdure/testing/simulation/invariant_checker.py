"""InvariantChecker: wraps the store behind all connections, and checks every write with its result, in store order.

From the committed writes it maintains its own model of each run (`RunModel`), without code of the store. It compares
the store and the writers with the models:

- a turn is committed only for the owner of the run, while the owner is not fenced, and only at the end of the history;
- recorded entries do not change, and completions are recorded in order;
- a rejected write does not change the run;
- only a rewind changes an ended run, and it is deleted only after its retention;
- a run keeps its workflow and version until it continues as new, and a retried run has waited for its backoff;
- a message is accepted once and consumed once, and only if it is stored;
- a run waits in its queue or holds a slot from its start to its end, and admissions keep all limits (`QueueModel`);
- a deferred has the value that it received in the current generation, and an awaited child has ended.

Violations are added to `violations` as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from perdure.model.queries import RunQuery
from perdure.model.records import Entry, EntryStatus, Message, RunRecord, RunResult, RunStatus, TopicEvent, WorkerRecord
from perdure.stores.protocol import Claim, Store
from perdure.stores.results import (
    Admitted,
    ClaimedRun,
    Committed,
    Created,
    EventPublished,
    Joined,
    MessageDelivered,
    Snapshot,
    UnreadableRun,
    WriteResult,
)
from perdure.stores.writes import (
    Admit,
    CommitTurn,
    ConfigurePartition,
    ConfigureQueue,
    ContinueAs,
    CreateRun,
    DeliverMessage,
    EndRun,
    LeaveQueue,
    PublishEvent,
    ReleaseRun,
    Requeue,
    RewindRun,
    RunPatch,
    Write,
)
from perdure.testing.faults import FaultyStore
from perdure.testing.simulation.queue_model import QueueModel
from perdure.testing.simulation.run_model import RunModel, is_known, is_sent_by_parent, new_run_model, started_at
from perdure.testing.simulation.write_trace import describe_result, describe_write, run_of

Trace = Callable[[str], None]


class InvariantChecker(FaultyStore):
    """Checks the writes of all processes. It wraps the one store and adds no delays."""

    def __init__(
        self, store: Store, trace: Trace, run_retention: float, now: Callable[[], float] = lambda: 0.0
    ) -> None:
        super().__init__(store)
        self.violations: list[str] = []
        self.models: dict[str, RunModel] = {}
        self.queue_model = QueueModel(self.report, now, self.models)
        self.pruned_runs: list[tuple[RunModel, RunRecord]] = []  # pruned runs, in their last state
        self.creations: dict[str, CreateRun] = {}
        self._run_retention = run_retention
        self.fenced: set[str] = set()
        self.unreadable: set[str] = set()  # runs whose rows cannot be decoded for a while
        self.sent: dict[tuple[str, str], TopicEvent] = {}
        self._trace = trace

    def report(self, violation: str) -> None:
        self._trace(f"VIOLATION: {violation}")
        self.violations.append(violation)

    # --- commits

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        touched = list(dict.fromkeys(run_id for write in batch if (run_id := run_of(write)) is not None))
        before = await self._snapshots(touched)
        results = await self.inner.commit(batch)
        after = await self._snapshots(touched)
        for write, result in zip(batch, results, strict=True):
            self._trace(f"  {describe_write(write)} -> {describe_result(result)}")
            try:
                self._apply(write, result, before)
            except Exception as error:  # the engine would handle it as a store error
                self.report(f"the invariant checker failed: {error!r}")
        for run_id in touched:
            self._compare(run_id, after[run_id])
        if self.queue_model.queues:
            await self.queue_model.check_store(self.inner)
        return results

    async def _snapshots(self, ids: list[str]) -> dict[str, Snapshot | None]:
        found = zip(ids, await self.inner.load(ids), strict=True)
        return {id: snapshot if isinstance(snapshot, Snapshot) else None for id, snapshot in found}

    def _apply(self, write: Write, result: WriteResult, before: dict[str, Snapshot | None]) -> None:
        match write, result:
            case CreateRun(record), Created() if record.id not in self.models:
                self.creations[record.id] = write
                self.models[record.id] = new_run_model(write, record.owner if result.owned else None)
                self._apply_arrival(write)
            case CreateRun(record), Created() if self.models[record.id].created_by != record.created_by:
                self._apply_replacement(write, result, before[record.id])
                self._apply_arrival(write)
            case CreateRun(record), Joined():
                if self.queue_model.join(write, result):
                    run = self.models[result.run_id]
                    run.workflow, run.version, run.pool = record.workflow, record.version, record.pool
            case CommitTurn(), Committed():
                found = before[write.run_id]
                inbox = {} if found is None else {each.number: each for each in found.inbox}
                self._apply_turn(self.models[write.run_id], write, inbox)
            case DeliverMessage(), MessageDelivered(fresh=True):
                self._apply_message(self.models[write.run_id], write.message)
            case EndRun(), Committed():
                self._apply_end(self.models[write.run_id], write)
            case ReleaseRun(), Committed():
                self.models[write.run_id].owner = None
            case RewindRun(), Committed():
                self._apply_rewind(self.models[write.run_id], write)
            case PublishEvent(), EventPublished(fresh=True):
                self.sent[write.event.topic, write.event.id] = write.event
            case Admit(), Admitted():
                self.queue_model.admit(write, result)
            case ConfigureQueue(), Committed(version=version):
                self.queue_model.configure(write, version)
            case ConfigurePartition(), Committed(version=version):
                self.queue_model.configure_partition(write, version)
            case Requeue(), Committed():
                self.queue_model.move(write.run_id, write.priority)
            case LeaveQueue(), Committed():
                self.queue_model.depart(write.run_id)

    def _apply_arrival(self, write: CreateRun) -> None:
        if write.place is not None:
            self.queue_model.arrive(write.record.id, write.place, write.record.created_at)

    def _apply_replacement(self, write: CreateRun, result: Created, before: Snapshot | None) -> None:
        """Apply a restart: the old generation has its last state, and the new one starts after its positions."""
        record, old = write.record, self.models[write.record.id]
        if write.replaces is None or before is None:
            self.report(f"run {record.id} was created twice")
            return
        if old.ending is None or (old.created_by, old.generation) != (
            write.replaces.created_by,
            write.replaces.generation,
        ):
            self.report(f"run {record.id} was restarted, but generation {old.generation} has not ended")
        self.pruned_runs.append((old, before.record))
        self.creations[record.id] = write
        new = self.models[record.id] = new_run_model(write, record.owner if result.owned else None)
        new.position, new.first_epoch = old.position + 1, record.epoch

    def _apply_turn(self, run: RunModel, turn: CommitTurn, inbox: dict[int, Message]) -> None:
        if turn.turn_id in run.turns:
            return  # a repeated write, because its result was lost
        run.turns.add(turn.turn_id)
        if turn.base != run.position:
            self.report(f"run {run.id}: a turn computed at {turn.base} was committed at {run.position}")
        if turn.worker != run.owner or turn.worker in self.fenced:
            self.report(f"run {run.id}: a turn of {turn.worker} was committed, but {run.owner} owns the run")
        if run.ending is not None:
            self.report(f"run {run.id}: a turn was committed after its end")
        for number in turn.consumed:
            self._consume(run, inbox.get(number), number)
        self._append(run, turn)
        if turn.patch is not None:
            run.owner = turn.patch.owner
            run.status = turn.patch.status
            if turn.patch.status.terminal:
                run.owner, run.ending = None, (turn.patch.status, turn.patch.result)
                self.queue_model.depart(run.id)
                self._check_retention(run, turn.patch)
        if turn.extras is not None:
            run.streamed += len(turn.extras.streamed)

    def _append(self, run: RunModel, turn: CommitTurn) -> None:
        carried = () if turn.continue_as is None else turn.continue_as.entries
        run.position = turn.base + max(1, len(turn.entries), len(carried))
        removed: dict[str, Entry] = {}
        for dropped in turn.extras.dropped if turn.extras is not None else ():
            below = [each for each in run.entries if each == dropped or each.startswith(f"{dropped}/")]
            removed.update((each, run.entries.pop(each)) for each in below)
        last = run.last_seq
        for entry in turn.entries:
            if removed.get(entry.location) == entry:  # kept, although the entries around it are pruned
                run.entries[entry.location] = removed.pop(entry.location)
            else:
                self._record(run, entry, last)
        run.pruned.update(removed)
        if turn.continue_as is not None:
            self._apply_restart(run, turn, turn.continue_as)
            run.pruned.update(run.entries)
            run.entries = {entry.location: entry for entry in carried}
            run.generation, run.epoch, run.last_seq = run.generation + 1, run.epoch + 1, -1

    def _apply_restart(self, run: RunModel, turn: CommitTurn, restart: ContinueAs) -> None:
        """Apply a continue-as-new or a retry. A retry waits for its backoff and keeps workflow and version."""
        if restart.run_attempt > 1:
            run.before_retry = len(run.recorded)
            if restart.run_attempt != run.run_attempt + 1:
                self.report(f"run {run.id}: attempt {restart.run_attempt} followed attempt {run.run_attempt}")
            if (restart.workflow, restart.version) != (run.workflow, run.version):
                self.report(f"run {run.id}: {run.workflow} failed, but {restart.workflow} is retried")
            if turn.patch is None or turn.patch.wake_at is None or turn.patch.wake_at <= turn.now:
                self.report(f"run {run.id} is retried without backoff")
        run.pool = run.pool if restart.pool is None else restart.pool
        run.before_epoch, run.begun_in = len(run.recorded), run.generation + 1
        run.workflow, run.version, run.run_attempt = restart.workflow, restart.version, restart.run_attempt

    def _check_retention(self, run: RunModel, patch: RunPatch) -> None:
        retention = self._run_retention if run.retention is None else run.retention
        run.prune_at = patch.prune_at
        if patch.ended_at is None or patch.prune_at != patch.ended_at + retention:
            self.report(
                f"run {run.id} ended at {patch.ended_at}, retained {retention} s, is pruned at {patch.prune_at}"
            )

    def _record(self, run: RunModel, entry: Entry, last: int) -> None:
        before, known = run.entries.get(entry.location), run.completed_entry(entry.location)
        again = before is not None and before.seq == entry.seq  # a compensated step that runs again at its location
        changed = known is not None and (known.status, known.value, known.seq) != (entry.status, entry.value, entry.seq)
        changed = changed or (known is not None and known.name != entry.name)
        if known is not None and (known.seq is not None or known.kind == "version") and changed:
            self.report(f"run {run.id}: the record of {entry.location} was {known} and became {entry}")
        if known is None and entry.status is not EntryStatus.PENDING and entry.seq is not None:
            if entry.seq <= last and not again:
                self.report(f"run {run.id}: {entry.location} was completed as {entry.seq}, after {last}")
            run.last_seq = max(run.last_seq, entry.seq)
            run.recorded.append(entry)
            self._check_awaited(run, entry)
        run.entries[entry.location] = entry

    def _check_awaited(self, run: RunModel, entry: Entry) -> None:
        """Check that the awaited value or end exists, in the current generation."""
        if entry.kind == "deferred":
            message = run.completed.get(f"deferred/{run.epoch}/{entry.name}")
            given = None if message is None else msgspec.json.decode(message.body or b"{}", type=RunResult).result
            if given != entry.value and not is_known(run, entry):
                self.report(f"run {run.id}: deferred {entry.name} has value {entry.value!r}, which no caller sent")
        elif entry.kind in ("child", "result", "outcome") and entry.detail is not None:
            child = self.models.get(msgspec.json.decode(entry.detail).get("id"))
            if child is not None and child.ending is None and not child.rewound:
                self.report(f"run {run.id}: {entry.location} has the result of {child.id}, which has not ended")

    def _consume(self, run: RunModel, message: Message | None, number: int) -> None:
        if message is None:
            self.report(f"run {run.id}: message {number} was consumed, but was not stored")
        elif message.kind in ("event", "assignment"):
            if message.id in run.consumed:
                self.report(f"run {run.id}: {message.kind} {message.id} was consumed twice")
            run.consumed[message.id] = message

    def _apply_message(self, run: RunModel, message: Message) -> None:
        if run.ending is not None:
            self.report(f"run {run.id}: {message.kind} {message.id} was accepted after its end")
        run.touched = run.touched or message.kind == "cancel"
        self.queue_model.on_message(run.id, message.kind)
        if message.kind == "cancel" and run.parent is not None and not is_sent_by_parent(message.id, run):
            self.report(f"run {run.id} of {run.parent} was cancelled by another: {message.id}")
        if message.kind == "event":
            if message.id in run.accepted:
                self.report(f"run {run.id}: event {message.id} was accepted twice")
            run.accepted[message.id] = message
        elif message.kind == "deferred":
            run.completed[message.id] = message

    def _apply_end(self, run: RunModel, end: EndRun) -> None:
        if end.turn_id in run.turns:
            return
        if run.ending is not None:
            self.report(f"run {run.id} was ended twice")
        run.turns.add(end.turn_id)
        run.prune_at = None if end.prune_after is None else end.now + end.prune_after
        run.position += 1
        run.terminated = True
        self.queue_model.depart(run.id)
        run.owner, run.touched, run.status, run.ending = None, True, end.status, (end.status, None)

    def _apply_rewind(self, run: RunModel, rewind: RewindRun) -> None:
        if rewind.turn_id in run.turns:
            return
        if rewind.base != run.position:
            self.report(f"run {run.id}: rewound at {run.position} by a caller that read {rewind.base}")
        run.turns.add(rewind.turn_id)
        if run.ending is not None and rewind.place is not None:
            self.queue_model.arrive(run.id, rewind.place, rewind.now)
        elif run.id in self.queue_model.places:
            self.queue_model.places[run.id].paused = False
        run.rewound = True
        run.position = rewind.base + max(1, len(rewind.entries))
        run.owner, run.touched, run.status, run.ending = None, True, RunStatus.SUSPENDED, None
        run.generation += 1
        stopped = {entry.name for entry in rewind.entries if entry.kind == "stop"}
        for child in self.models.values():
            if child.ending is None and child.id not in stopped and started_at(child, run) in rewind.dropped:
                self.report(f"run {run.id} was rewound to before the start of {child.id}, which is not stopped")
        for location in rewind.dropped:
            run.entries.pop(location, None)
        run.entries.update((entry.location, entry) for entry in rewind.entries)
        run.last_seq = max((each.seq for each in run.entries.values() if each.seq is not None), default=-1)
        for message in rewind.returned:
            if message.kind == "deferred":
                run.completed.setdefault(message.id, message)  # a fork has it from its original run
            run.consumed.pop(message.id, None)
            run.returned[message.id] = message

    def _compare(self, run_id: str, stored: Snapshot | None) -> None:
        """Compare the store with the model: rejected writes change nothing, committed writes are stored."""
        run = self.models.get(run_id)
        if stored is None or run is None:
            if (stored is None) != (run is None):
                self.report(f"run {run_id} is {'not stored' if stored is None else 'stored, but was never created'}")
            return
        record, position = stored.record, max(stored.position, stored.record.fence)
        if position != run.position or record.generation != run.generation:
            modelled, actual = (run.generation, run.position), (record.generation, position)
            self.report(f"run {run_id} is at {actual}, but its writes result in {modelled}")
        self.queue_model.check_row(record)
        if (record.workflow, record.version, record.run_attempt) != (run.workflow, run.version, run.run_attempt):
            self.report(f"run {run_id} is {record.workflow} {record.version}, expected {run.workflow} {run.version}")
        if record.status.terminal != (run.ending is not None):
            self.report(f"run {run_id} is {record.status}, but its writes result in {run.status}")
        if run.ending is not None and run.ending != (record.status, record.result):
            self.report(f"run {run_id} ended as {run.ending}, but is {record.status} now")
        latest = {entry.location: entry for entry in stored.entries}
        if latest != run.entries:
            different = [each for each in {**latest, **run.entries} if latest.get(each) != run.entries.get(each)]
            self.report(f"run {run_id}: stored entries differ from the written ones: {sorted(different)}")

    # --- reads

    async def load(self, ids: Sequence[str]) -> Sequence[Snapshot | UnreadableRun | None]:
        self._check_readable(ids)
        return await self.inner.load(ids)

    async def records(self, ids: Sequence[str]) -> Sequence[RunRecord | UnreadableRun | None]:
        self._check_readable(ids)
        return await self.inner.records(ids)

    def _check_readable(self, ids: Sequence[str]) -> None:
        if damaged := sorted(self.unreadable.intersection(ids)):
            raise msgspec.ValidationError(f"the row of run {damaged[0]} cannot be decoded (planned)")

    # --- ownership

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        claimed = await self.inner.claim(claim)
        for each in claimed:
            run = self.models[each.id]
            if run.owner is not None or run.ending is not None or claim.worker in self.fenced:
                self.report(f"run {each.id} of {run.owner} was claimed by {claim.worker}")
            run.owner = claim.worker
            self.queue_model.on_claim(claim.worker, each.id)
            self._trace(f"  {claim.worker} claims {each.id}")
        return claimed

    async def release_runs(self, worker_id: str, now: float, *, recovered: bool, limit: int = 500) -> list[str]:
        released = await self.inner.release_runs(worker_id, now, recovered=recovered, limit=limit)
        for run_id in released:
            self._trace(f"  {run_id} is released from {worker_id}")
            self.models[run_id].owner = None
        return released

    async def renew(self, worker: WorkerRecord) -> bool:
        renewed = await self.inner.renew(worker)
        if renewed and worker.id in self.fenced:
            self.report(f"worker {worker.id} was fenced and has renewed its lease")
        return renewed

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        fenced = await self.inner.fence_worker(worker_id, unless_renewed_after)
        if fenced:
            self._trace(f"  {worker_id} is fenced")
            self.fenced.add(worker_id)
        return fenced

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> list[str]:
        before = {record.id: record for record in (await self.inner.runs(_ALL)).runs}
        unfinalized = {each.record.id for each in await self.inner.unfinalized(1_000)}
        pruned = await self.inner.prune(now, limit, keep_ids_for=keep_ids_for)
        left = {record.id for record in (await self.inner.runs(_ALL)).runs}
        removed = [record for run_id, record in before.items() if run_id not in left]
        if {record.id for record in removed} != set(pruned):
            self.report(f"the runs {pruned} were pruned, but {[record.id for record in removed]} are deleted")
        for record in removed:
            self._apply_pruned(self.models.pop(record.id), record, now, record.id in unfinalized)
        for record in removed:
            if record.parent in self.models and self.models[record.parent].ending is None:
                self.report(f"run {record.id} was pruned, but its parent {record.parent} has not ended")
        return pruned

    def _apply_pruned(self, run: RunModel, record: RunRecord, now: float, unfinalized: bool) -> None:
        self._trace(f"  {run.id} is pruned")
        self.pruned_runs.append((run, record))
        if run.ending is None or unfinalized:
            self.report(f"run {run.id} was pruned, but {'is not finalized' if unfinalized else 'has not ended'}")
        elif run.prune_at is None or run.prune_at > now:
            self.report(f"run {run.id} was pruned at {now}, before {run.prune_at}")


_ALL = RunQuery(limit=1_000)
