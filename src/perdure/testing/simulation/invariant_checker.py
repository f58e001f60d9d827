"""The witness stands behind all doors, at the store itself: it sees every write with its answer, in their one order.

From what was committed it keeps its own simple picture of each run (`Picture`), with none of the store's code, and
holds the store and those who write to it against it:

- a turn is taken only from the run's owner, while it is alive, and only at the end of the history;
- what is on record stays as it is, and completions are recorded in order;
- a refused write leaves the run as it was;
- a run that has ended is changed by nothing but a rewind, and is deleted only when its time has come;
- a run keeps its workflow and version until it begins anew, and one that is tried again has waited for that;
- a message is accepted once, consumed once, and only if it was there;
- a deferred has the value that was given to it in this very generation, and a child that is waited for has ended.

What is broken goes to `broken`, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from perdure.model.queries import RunQuery
from perdure.model.records import Entry, EntryStatus, Message, RunRecord, RunResult, RunStatus, TopicEvent, WorkerRecord
from perdure.stores.protocol import Claim, Store
from perdure.stores.results import (
    ClaimedRun,
    Committed,
    Created,
    EventPublished,
    MessageDelivered,
    Snapshot,
    WriteResult,
)
from perdure.stores.writes import (
    CommitTurn,
    ContinueAs,
    CreateRun,
    DeliverMessage,
    EndRun,
    PublishEvent,
    ReleaseRun,
    RewindRun,
    RunPatch,
    Write,
)
from perdure.testing.faults import FaultyStore
from perdure.testing.simulation.run_model import RunModel, born, is_known, started_at

Trace = Callable[[str], None]


class InvariantChecker(FaultyStore):
    """See the module's docstring. Wraps the one store; no call waits here."""

    def __init__(self, store: Store, trace: Trace, run_retention: float) -> None:
        super().__init__(store)
        self.violations: list[str] = []
        self.models: dict[str, RunModel] = {}
        self.departed: list[tuple[RunModel, RunRecord]] = []  # runs that were pruned, as they were
        self.births: dict[str, CreateRun] = {}
        self._run_retention = run_retention
        self.gone: set[str] = set()
        self.sent: dict[tuple[str, str], TopicEvent] = {}
        self._trace = trace

    def breaks(self, what: str) -> None:
        self._trace(f"BROKEN: {what}")
        self.violations.append(what)

    # --- commits

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        touched = list(dict.fromkeys(run_id for write in batch if (run_id := _run_of(write)) is not None))
        before = dict(zip(touched, await self.inner.load(touched), strict=True))
        answers = await self.inner.commit(batch)
        after = dict(zip(touched, await self.inner.load(touched), strict=True))
        mail = {id: {each.number: each for each in found.inbox} for id, found in before.items() if found is not None}
        for write, answer in zip(batch, answers, strict=True):
            self._trace(f"  {_said(write)} -> {_answered(answer)}")
            try:
                self._take(write, answer, mail)
            except Exception as error:  # the engine would take it for a fault of the store
                self.breaks(f"the witness itself failed: {error!r}")
        for run_id in touched:
            self._compare(run_id, after[run_id])
        return answers

    def _take(self, write: Write, answer: WriteResult, mail: dict[str, dict[int, Message]]) -> None:
        match write, answer:
            case CreateRun(record), Created() if record.id not in self.models:
                self.births[record.id] = write
                self.models[record.id] = born(write, record.owner if answer.owned else None)
            case CreateRun(record), Created() if self.models[record.id].created_by != record.created_by:
                self.breaks(f"run {record.id} was created twice")
            case CommitTurn(), Committed():
                self._take_turn(self.models[write.run_id], write, mail.get(write.run_id, {}))
            case DeliverMessage(), MessageDelivered(fresh=True):
                self._take_message(self.models[write.run_id], write.message)
            case EndRun(), Committed():
                self._take_end(self.models[write.run_id], write)
            case ReleaseRun(), Committed():
                self.models[write.run_id].owner = None
            case RewindRun(), Committed():
                self._take_rewind(self.models[write.run_id], write)
            case PublishEvent(), EventPublished(fresh=True):
                self.sent[write.event.topic, write.event.id] = write.event

    def _take_turn(self, run: RunModel, turn: CommitTurn, mail: dict[int, Message]) -> None:
        if turn.turn_id in run.turns:
            return  # a repetition: its answer had been lost
        run.turns.add(turn.turn_id)
        if turn.base != run.position:
            self.breaks(f"run {run.id}: a turn computed at {turn.base} was taken at {run.position}")
        if turn.worker != run.owner or turn.worker in self.gone:
            self.breaks(f"run {run.id}: a turn of {turn.worker} was taken, and {run.owner} owns it")
        if run.ending is not None:
            self.breaks(f"run {run.id}: a turn was taken after its end")
        for number in turn.consumed:
            self._consume(run, mail.get(number), number)
        self._append(run, turn)
        if turn.patch is not None:
            run.owner = turn.patch.owner
            run.status = turn.patch.status
            if turn.patch.status.terminal:
                run.owner, run.ending = None, (turn.patch.status, turn.patch.result)
                self._check_kept(run, turn.patch)
        if turn.extras is not None:
            run.streamed += len(turn.extras.streamed)

    def _append(self, run: RunModel, turn: CommitTurn) -> None:
        carried = () if turn.continue_as is None else turn.continue_as.entries
        run.position = turn.base + max(1, len(turn.entries), len(carried))
        gone: dict[str, Entry] = {}
        for dropped in turn.extras.dropped if turn.extras is not None else ():
            below = [each for each in run.entries if each == dropped or each.startswith(f"{dropped}/")]
            gone.update((each, run.entries.pop(each)) for each in below)
        last = run.last_seq
        for entry in turn.entries:
            if gone.get(entry.location) == entry:  # it outlasts what is pruned around it
                run.entries[entry.location] = gone.pop(entry.location)
            else:
                self._record(run, entry, last)
        run.pruned.update(gone)
        if turn.continue_as is not None:
            self._begin_anew(run, turn, turn.continue_as)
            run.pruned.update(run.entries)
            run.entries = {entry.location: entry for entry in carried}
            run.generation, run.epoch, run.last_seq = run.generation + 1, run.epoch + 1, -1

    def _begin_anew(self, run: RunModel, turn: CommitTurn, restart: ContinueAs) -> None:
        """As another, or because it failed and is tried again: then it has waited, and is what it was."""
        if restart.run_attempt > 1:
            run.before_retry = len(run.recorded)
            if restart.run_attempt != run.run_attempt + 1:
                self.breaks(f"run {run.id}: attempt {restart.run_attempt} came after {run.run_attempt}")
            if (restart.workflow, restart.version) != (run.workflow, run.version):
                self.breaks(f"run {run.id}: {run.workflow} failed, and {restart.workflow} is tried")
            if turn.patch is None or turn.patch.wake_at is None or turn.patch.wake_at <= turn.now:
                self.breaks(f"run {run.id} is tried again at once")
        run.before_epoch, run.begun_in = len(run.recorded), run.generation + 1
        run.workflow, run.version, run.run_attempt = restart.workflow, restart.version, restart.run_attempt

    def _check_kept(self, run: RunModel, patch: RunPatch) -> None:
        kept = self._run_retention if run.retention is None else run.retention
        run.prune_at = patch.prune_at
        if patch.ended_at is None or patch.prune_at != patch.ended_at + kept:
            self.breaks(f"run {run.id} ended at {patch.ended_at}, is kept for {kept} s and goes at {patch.prune_at}")

    def _record(self, run: RunModel, entry: Entry, last: int) -> None:
        before, known = run.entries.get(entry.location), run.settled_at(entry.location)
        again = before is not None and before.seq == entry.seq  # a step that was undone and runs again in its place
        changed = known is not None and (known.status, known.value, known.seq) != (entry.status, entry.value, entry.seq)
        changed = changed or (known is not None and known.name != entry.name)
        if known is not None and (known.seq is not None or known.kind == "version") and changed:
            self.breaks(f"run {run.id}: the record of {entry.location} was {known} and became {entry}")
        if known is None and entry.status is not EntryStatus.PENDING and entry.seq is not None:
            if entry.seq <= last and not again:
                self.breaks(f"run {run.id}: {entry.location} was completed as {entry.seq}, after {last}")
            run.last_seq = max(run.last_seq, entry.seq)
            run.recorded.append(entry)
            self._check_answer(run, entry)
        run.entries[entry.location] = entry

    def _check_answer(self, run: RunModel, entry: Entry) -> None:
        """What was waited for has come about, and not in another generation."""
        if entry.kind == "deferred":
            message = run.completed.get(f"deferred/{run.epoch}/{entry.name}")
            given = None if message is None else msgspec.json.decode(message.body or b"{}", type=RunResult).result
            if given != entry.value and not is_known(run, entry):
                self.breaks(f"run {run.id}: deferred {entry.name} came to {entry.value!r}, which nobody gave it")
        elif entry.kind in ("child", "result", "outcome") and entry.detail is not None:
            child = self.models.get(msgspec.json.decode(entry.detail).get("id"))
            if child is not None and child.ending is None and not child.rewound:
                self.breaks(f"run {run.id}: {entry.location} knows the end of {child.id}, which goes on")

    def _consume(self, run: RunModel, message: Message | None, number: int) -> None:
        if message is None:
            self.breaks(f"run {run.id}: message {number} was consumed, and was not there")
        elif message.kind in ("event", "assignment"):
            if message.id in run.consumed:
                self.breaks(f"run {run.id}: {message.kind} {message.id} was consumed twice")
            run.consumed[message.id] = message

    def _take_message(self, run: RunModel, message: Message) -> None:
        if run.ending is not None:
            self.breaks(f"run {run.id}: {message.kind} {message.id} was accepted after its end")
        run.touched = run.touched or message.kind == "cancel"
        if message.kind == "cancel" and run.parent is not None and not message.id.startswith(f"cancel/{run.parent}/"):
            self.breaks(f"run {run.id} of {run.parent} was cancelled by another: {message.id}")
        if message.kind == "event":
            if message.id in run.accepted:
                self.breaks(f"run {run.id}: event {message.id} was accepted twice")
            run.accepted[message.id] = message
        elif message.kind == "deferred":
            run.completed[message.id] = message

    def _take_end(self, run: RunModel, end: EndRun) -> None:
        if end.turn_id in run.turns:
            return
        if run.ending is not None:
            self.breaks(f"run {run.id} was ended twice")
        run.turns.add(end.turn_id)
        run.prune_at = None if end.prune_after is None else end.now + end.prune_after
        run.position += 1
        run.terminated = True
        run.owner, run.touched, run.status, run.ending = None, True, end.status, (end.status, None)

    def _take_rewind(self, run: RunModel, rewind: RewindRun) -> None:
        if rewind.turn_id in run.turns:
            return
        if rewind.base != run.position:
            self.breaks(f"run {run.id}: rewound at {run.position} by one who saw {rewind.base}")
        run.turns.add(rewind.turn_id)
        run.rewound = True
        run.position = rewind.base + max(1, len(rewind.entries))
        run.owner, run.touched, run.status, run.ending = None, True, RunStatus.SUSPENDED, None
        run.generation += 1
        stopped = {entry.name for entry in rewind.entries if entry.kind == "stop"}
        for child in self.models.values():
            if child.ending is None and child.id not in stopped and started_at(child, run) in rewind.dropped:
                self.breaks(f"run {run.id} was rewound to before it started {child.id}, which is not stopped")
        for location in rewind.dropped:
            run.entries.pop(location, None)
        run.entries.update((entry.location, entry) for entry in rewind.entries)
        run.last_seq = max((each.seq for each in run.entries.values() if each.seq is not None), default=-1)
        for message in rewind.returned:
            if message.kind == "deferred":
                run.completed.setdefault(message.id, message)  # a fork had it from the run that it was made from
            run.consumed.pop(message.id, None)
            run.returned[message.id] = message

    def _compare(self, run_id: str, stored: Snapshot | None) -> None:
        """The store against the picture: what was refused has changed nothing, what was taken is there."""
        run = self.models.get(run_id)
        if stored is None or run is None:
            if (stored is None) != (run is None):
                self.breaks(f"run {run_id} is {'not ' if stored is None else ''}there")
            return
        record, position = stored.record, max(stored.position, stored.record.fence)
        if position != run.position or record.generation != run.generation:
            mine, theirs = (run.generation, run.position), (record.generation, position)
            self.breaks(f"run {run_id} is at {theirs}, and its writes came to {mine}")
        if (record.workflow, record.version, record.run_attempt) != (run.workflow, run.version, run.run_attempt):
            self.breaks(f"run {run_id} is {record.workflow} {record.version}, and was {run.workflow} {run.version}")
        if record.status.terminal != (run.ending is not None):
            self.breaks(f"run {run_id} is {record.status}, and its writes came to {run.status}")
        if run.ending is not None and run.ending != (record.status, record.result):
            self.breaks(f"run {run_id} ended as {run.ending}, and is {record.status} now")
        latest = {entry.location: entry for entry in stored.entries}
        if latest != run.entries:
            different = [each for each in {**latest, **run.entries} if latest.get(each) != run.entries.get(each)]
            self.breaks(f"run {run_id}: other records than were written: {sorted(different)}")

    # --- who owns what

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        claimed = await self.inner.claim(claim)
        for each in claimed:
            run = self.models[each.id]
            if run.owner is not None or run.ending is not None or claim.worker in self.gone:
                self.breaks(f"run {each.id} of {run.owner} was given to {claim.worker}")
            run.owner = claim.worker
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
        if renewed and worker.id in self.gone:
            self.breaks(f"worker {worker.id} was declared gone and is back under its old id")
        return renewed

    async def fence_worker(self, worker_id: str, unless_renewed_after: float | None = None) -> bool:
        gone = await self.inner.fence_worker(worker_id, unless_renewed_after)
        if gone:
            self._trace(f"  {worker_id} is declared gone")
            self.gone.add(worker_id)
        return gone

    async def prune(self, now: float, limit: int = 500, *, keep_ids_for: float = 0.0) -> int:
        before = {record.id: record for record in (await self.inner.runs(_ALL)).runs}
        owing = {each.record.id for each in await self.inner.unfinalized(1_000)}
        pruned = await self.inner.prune(now, limit, keep_ids_for=keep_ids_for)
        left = {record.id for record in (await self.inner.runs(_ALL)).runs}
        gone = [record for run_id, record in before.items() if run_id not in left]
        if len(gone) != pruned:
            self.breaks(f"{pruned} runs were pruned, and {len(gone)} are gone")
        for record in gone:
            self._take_pruned(self.models.pop(record.id), record, now, record.id in owing)
        for record in gone:
            if record.parent in self.models and self.models[record.parent].ending is None:
                self.breaks(f"run {record.id} was pruned, and its parent {record.parent} goes on")
        return pruned

    def _take_pruned(self, run: RunModel, record: RunRecord, now: float, owing: bool) -> None:
        self._trace(f"  {run.id} is pruned")
        self.departed.append((run, record))
        if run.ending is None or owing:
            self.breaks(f"run {run.id} was pruned, and {'owes something' if owing else 'has not ended'}")
        elif run.prune_at is None or run.prune_at > now:
            self.breaks(f"run {run.id} was pruned at {now}, and was to be kept until {run.prune_at}")


_ALL = RunQuery(limit=1_000)


def _run_of(write: Write) -> str | None:
    if isinstance(write, CreateRun):
        return write.record.id
    return getattr(write, "run_id", None)


def _said(write: Write) -> str:
    kind = type(write).__name__
    match write:
        case CreateRun():
            return f"{kind} {write.record.id}{': forked' if write.entries else ''}"
        case CommitTurn():
            changes = " ".join(f"{each.location}={each.status}" for each in write.entries)
            state = "" if write.patch is None else f" now {write.patch.status}"
            took = f" took {list(write.consumed)}" if write.consumed else ""
            return f"{kind} {write.run_id} at {write.base}: {changes}{took}{state}"
        case DeliverMessage():
            return f"{kind} {write.run_id}: {write.message.kind} {write.message.name} {write.message.id}"
        case PublishEvent():
            return f"{kind} {write.event.topic} {write.event.id}"
        case _:
            return f"{kind} {_run_of(write) or ''}"


def _answered(answer: WriteResult) -> str:
    return type(answer).__name__ + (" (messages)" if isinstance(answer, Committed) and answer.has_messages else "")
