"""QueueModel: places, slots and settings of all queues, derived from committed writes, without code of the store.

The invariant checker applies every write with its result. The model reports

- an admission of another version, of a run that may not be admitted, out of order, or beyond what was planned;
- slots beyond a limit (guarantee 10), admissions beyond a rate, and an admission of a paused queue;
- two waiting runs of one dedupe key;
- a waiting run that is due or has an owner, and a run that ended and has a place;
- a worker that owns more runs of a queue than its limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from perdure.model.queue_records import Place, QueueSettings, RateLimit, Take
from perdure.model.records import RunRecord
from perdure.queues.effective_settings import effective_settings, partition_limits
from perdure.stores.protocol import Store
from perdure.stores.results import Admitted, Joined
from perdure.stores.writes import Admit, ConfigurePartition, ConfigureQueue, CreateRun
from perdure.testing.simulation.run_model import RunModel

EVERY_PLACE = 100_000


@dataclass(slots=True)
class PlaceModel:
    """The place of one run. `gated`: its slot was given under a limit per worker."""

    run_id: str
    queue: str
    partition: str
    priority: int
    number: int
    since: float
    eligible_at: float | None = None
    latest_at: float | None = None
    expires_at: float | None = None
    dedupe: str | None = None
    joined_by: str | None = None
    held: bool = False
    paused: bool = False
    gated: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return (self.priority, self.number)


@dataclass(slots=True)
class QueueState:
    """The settings of one queue, and its admissions since they were last changed."""

    name: str
    version: int
    write: ConfigureQueue
    overrides: dict[str, ConfigurePartition] = field(default_factory=dict)
    admitted: list[tuple[float, str]] = field(default_factory=list)  # times and partitions
    worker_limits: list[int | None] = field(default_factory=list)  # all that it had
    free_since: float = 0.0  # when a slot or a run was last added, or the settings were changed

    @property
    def settings(self) -> QueueSettings:
        return effective_settings(self.write.declared, self.write.override)


class QueueModel:
    """The queues of one simulation. `now` returns the store's time."""

    def __init__(self, report: Callable[[str], None], now: Callable[[], float], runs: Mapping[str, RunModel]) -> None:
        self._report = report
        self._now = now
        self._runs = runs
        self._last_number = 0
        self.queues: dict[str, QueueState] = {}
        self.places: dict[str, PlaceModel] = {}
        self.most_slots: Counter[str] = Counter()  # the highest number of slots that each queue held
        self.admissions = 0

    # --- runs

    def arrive(self, run_id: str, place: Place, since: float) -> None:
        """Apply the creation, restart or rewind of a run that waits."""
        queue = self.queues.get(place.queue)
        if queue is None or run_id in self.places:
            self._report(f"run {run_id} got a place in queue {place.queue}, which is unknown, or has one")
            return
        same = [each for each in self._waiting(place.queue) if place.dedupe and each.dedupe == place.dedupe]
        if same:
            self._report(f"runs {run_id} and {same[0].run_id} wait with dedupe key {place.dedupe}")
        self._last_number += 1
        self.places[run_id] = PlaceModel(
            run_id,
            place.queue,
            place.partition,
            place.priority,
            self._last_number,
            since,
            place.eligible_at,
            place.latest_at,
            place.expires_at,
            place.dedupe,
        )
        queue.free_since = self._now()

    def depart(self, run_id: str) -> None:
        """Apply the end of a run, or its departure from its queue."""
        place = self.places.pop(run_id, None)
        if place is not None:
            self.queues[place.queue].free_since = self._now()

    def join(self, write: CreateRun, result: Joined) -> bool:
        """Apply a start that joined a place. Return whether the run of the place got the payload of the start."""
        wanted, place = write.place, self.places.get(result.run_id)
        if wanted is None or place is None or place.dedupe != wanted.dedupe or place.queue != wanted.queue:
            self._report(f"start {write.record.created_by} joined {result.run_id}, which does not have its key")
            return False
        changes = wanted.debounce or wanted.on_duplicate == "replace"
        if place.joined_by == write.record.created_by or not changes:
            return False
        if place.held:
            self._report(f"start {write.record.created_by} changed {place.run_id}, which holds a slot")
        place.joined_by = write.record.created_by
        if wanted.debounce and place.eligible_at is not None and wanted.eligible_at is not None:
            latest_at = wanted.eligible_at if place.latest_at is None else place.latest_at
            place.eligible_at = min(wanted.eligible_at, latest_at)
        return wanted.on_duplicate == "replace"

    def on_message(self, run_id: str, kind: str) -> None:
        """Apply a message: a pause holds a waiting run, and a resume or cancel ends that."""
        place = self.places.get(run_id)
        if place is not None and not place.held and kind in ("pause", "resume", "cancel"):
            place.paused = kind == "pause"
            self.queues[place.queue].free_since = self._now()

    def move(self, run_id: str, priority: int) -> None:
        """Apply a change of priority."""
        self.places[run_id].priority = priority

    # --- settings

    def configure(self, write: ConfigureQueue, version: int) -> None:
        """Apply new settings, or the creation of a queue."""
        queue = self.queues.get(write.name)
        if queue is None:
            queue = self.queues[write.name] = QueueState(write.name, version, write)
        elif version != queue.version:
            if version < queue.version or write.base != queue.version:
                self._report(
                    f"queue {write.name} of version {queue.version} was configured by a caller of {write.base}"
                )
            queue.write, queue.version = write, version
            queue.admitted.clear()
        queue.worker_limits.append(queue.settings.worker_concurrency)
        queue.free_since = self._now()

    def configure_partition(self, write: ConfigurePartition, version: int) -> None:
        """Apply the override of a partition."""
        queue = self.queues[write.queue]
        queue.overrides[write.partition], queue.version = write, version
        queue.admitted.clear()
        queue.free_since = self._now()

    # --- admission

    def admit(self, write: Admit, result: Admitted) -> None:
        """Apply an admission and check what it did."""
        queue = self.queues[write.queue]
        if write.base != queue.version or result.version <= queue.version:
            self._report(f"queue {queue.name} of version {queue.version} admitted runs by a plan of {write.base}")
        if queue.write.paused is not None and result.runs:
            self._report(f"queue {queue.name} is paused and admitted {result.runs}")
        queue.version = result.version
        self._promote(write, result.promoted)
        takes = {take.partition: take for take in write.takes}
        for partition in {self._partition_of(run_id) for run_id in result.runs}:
            self._check_order(write, takes.get(partition), partition, result.runs)
        for run_id in result.runs:
            self._give_slot(queue, write, run_id)
        if result.runs:  # a lower limit may be exceeded until runs have ended, but admits none
            self._check_limits(queue)
            self._check_rates(queue)

    def _partition_of(self, run_id: str) -> str:
        place = self.places.get(run_id)
        return "" if place is None else place.partition

    def _promote(self, write: Admit, promoted: int) -> None:
        delayed = [each for each in self._waiting(write.queue) if each.eligible_at is not None]
        due = sorted(
            (each for each in delayed if each.eligible_at is not None and each.eligible_at <= write.now),
            key=lambda each: (each.eligible_at, each.number),
        )
        if promoted > write.promote or promoted != len(due[: write.promote]):
            self._report(f"queue {write.queue} promoted {promoted} of {len(due)} delayed places, up to {write.promote}")
        for each in due[:promoted]:
            self._last_number += 1
            each.eligible_at, each.number = None, self._last_number

    def _check_order(self, write: Admit, take: Take | None, partition: str, runs: tuple[str, ...]) -> None:
        """Check that the runs of one partition are its first ones that may be admitted."""
        taken = [run_id for run_id in runs if self._partition_of(run_id) == partition]
        in_order = sorted(self._waiting(write.queue), key=lambda each: each.order)
        may = [each.run_id for each in in_order if each.partition == partition and self._is_admissible(each, write)]
        if taken != may[: len(taken)]:
            self._report(
                f"queue {write.queue} admitted {taken} of partition {partition!r}, but {may} may go in this order"
            )
        if take is None or len(taken) > take.count:
            self._report(f"queue {write.queue} admitted {taken} of partition {partition!r}, more than planned")

    def _is_admissible(self, place: PlaceModel, write: Admit) -> bool:
        run = self._runs.get(place.run_id)
        expired = place.expires_at is not None and place.expires_at <= write.now
        served = run is not None and (run.workflow, run.version, run.pool) in write.serves
        return place.eligible_at is None and not expired and not place.paused and served

    def _give_slot(self, queue: QueueState, write: Admit, run_id: str) -> None:
        place = self.places.get(run_id)
        if place is None or place.queue != queue.name or place.held:
            self._report(f"queue {queue.name} admitted {run_id}, which does not wait in it")
            return
        place.held, place.gated = True, write.gate
        queue.admitted.append((self._now(), place.partition))
        self.admissions += 1

    # --- limits

    def _check_limits(self, queue: QueueState) -> None:
        """Guarantee 10: an admission leaves no more slots held than the limits allow."""
        holders = [each for each in self.places.values() if each.queue == queue.name and each.held]
        self.most_slots[queue.name] = max(self.most_slots[queue.name], len(holders))
        limit = queue.settings.concurrency
        if limit is not None and len(holders) > limit:
            self._report(f"queue {queue.name} holds {len(holders)} slots, but its limit is {limit}")
        for partition, count in Counter(each.partition for each in holders).items():
            of_partition = self._partition_limit(queue, partition)
            if of_partition is not None and count > of_partition:
                self._report(
                    f"partition {partition!r} of {queue.name} holds {count} slots, its limit is {of_partition}"
                )

    def _partition_limit(self, queue: QueueState, partition: str) -> int | None:
        override = queue.overrides.get(partition)
        return partition_limits(queue.settings, None if override is None else override.override).concurrency

    def _check_rates(self, queue: QueueState) -> None:
        """Check the admissions of the last interval. Changed settings begin with no admissions."""
        rate = queue.settings.rate
        self._check_rate(queue, rate, [at for at, _ in queue.admitted])
        for partition in {partition for _, partition in queue.admitted}:
            override = queue.overrides.get(partition)
            limits = partition_limits(queue.settings, None if override is None else override.override)
            self._check_rate(queue, limits.rate, [at for at, of in queue.admitted if of == partition])

    def _check_rate(self, queue: QueueState, rate: RateLimit | None, times: list[float]) -> None:
        if rate is not None and sum(at > self._now() - rate.per for at in times) > rate.limit:
            self._report(f"queue {queue.name} admitted more than {rate.limit} runs in {rate.per:g} s")

    def on_claim(self, worker: str, run_id: str) -> None:
        """Check a run that a worker claims, and the limit of its queue per worker."""
        place = self.places.get(run_id)
        if place is None:
            return
        if not place.held:
            self._report(f"run {run_id} was claimed by {worker}, but waits in queue {place.queue}")
        gated = [each for each in self.places.values() if each.queue == place.queue and each.gated]
        owned = [each.run_id for each in gated if self._owner(each.run_id) == worker]
        limits = self.queues[place.queue].worker_limits
        if place.gated and None not in limits and len(owned) > max(limit or 0 for limit in limits):
            self._report(f"worker {worker} owns {owned} of queue {place.queue}, more than its limit")

    def _owner(self, run_id: str) -> str | None:
        run = self._runs.get(run_id)
        return None if run is None else run.owner

    # --- comparison with the store

    def _waiting(self, name: str) -> list[PlaceModel]:
        return [each for each in self.places.values() if each.queue == name and not each.held]

    def check_row(self, record: RunRecord) -> None:
        """Check the waiting rule: a waiting run is not due and has no owner."""
        place = self.places.get(record.id)
        waits = place is not None and not place.held
        if record.waiting != waits or (place is not None and record.status.terminal):
            self._report(f"run {record.id} is {record.status}, waiting={record.waiting}, but its place is {place}")
        if waits and (record.wake_at is not None or record.owner is not None):
            self._report(f"run {record.id} waits in a queue, but is due at {record.wake_at}, owner {record.owner}")

    async def check_store(self, store: Store) -> None:
        """Compare the places of every queue, in order, and the rows of their runs."""
        for record in await store.records(list(self.places)):
            if isinstance(record, RunRecord):
                self.check_row(record)
            elif record is None:
                self._report("a run that has a place is not stored")
        for name, queue in self.queues.items():
            view = await store.queue_view(name, self._now())
            found = [each.run_id for each in await store.places(name, limit=EVERY_PLACE)]
            held = sorted(each.run_id for each in await store.places(name, limit=EVERY_PLACE, held=True))
            in_order = sorted(self._waiting(name), key=lambda each: (each.partition, *each.order))
            slots = sorted(each.run_id for each in self.places.values() if each.queue == name and each.held)
            if found != [each.run_id for each in in_order] or held != slots:
                modelled = [each.run_id for each in in_order], slots
                self._report(f"queue {name} has places {found} and slots {held}, but its writes result in {modelled}")
            if view is None or (view.version, view.held) != (queue.version, len(slots)):
                self._report(f"queue {name} has the view {view}, but its writes result in version {queue.version}")

    def expired(self, name: str, by: float) -> bool:
        """Return whether a place of the queue that had expired by this time still waits."""
        return any(each.expires_at is not None and each.expires_at < by for each in self._waiting(name))

    def unserved_since(self, name: str, serves: frozenset[tuple[str, int, str]], active: int) -> float | None:
        """Return since when a slot of the queue is free although a run that may have it waits; None if none does.

        `active` is the number of holders that a worker executes, or that are due. With a limit per worker, none is
        expected while there are as many as one worker executes.
        """
        queue = self.queues[name]
        settings, now = queue.settings, self._now()
        held = [each for each in self.places.values() if each.queue == name and each.held]
        if queue.write.paused is not None or (settings.concurrency is not None and len(held) >= settings.concurrency):
            return None
        if settings.worker_concurrency is not None and active >= settings.worker_concurrency:
            return None
        rates = [rate for rate in (settings.rate, settings.partition_rate) if rate is not None]
        if any(at > now - 2 * rate.per for rate in rates for at, _ in queue.admitted):
            return None
        slots = Counter(each.partition for each in held)
        since: list[float] = []
        for each in self._waiting(name):
            run, limit = self._runs.get(each.run_id), self._partition_limit(queue, each.partition)
            expired = each.expires_at is not None and each.expires_at <= now
            is_served = run is not None and (run.workflow, run.version, run.pool) in serves
            if expired or each.paused or not is_served or (limit is not None and slots[each.partition] >= limit):
                continue
            since.append(max(each.since, each.eligible_at or 0.0, queue.free_since))
        return min((at for at in since if at <= now), default=None)
