"""QueueModel: a queue in plain Python, as a store keeps it, for tests of the plan. It checks every limit."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from perdure.model.queue_records import (
    PartitionOverride,
    PartitionView,
    QueueOverride,
    QueuePause,
    QueueSettings,
    QueueView,
    RateLimit,
)
from perdure.model.records import WorkerRecord
from perdure.queues.admission_plan import AdmissionPlan, plan
from perdure.queues.effective_settings import effective_settings, partition_limits
from perdure.stores.writes import Admit

WORKER = WorkerRecord(id="w", pool="default", workflows=(("job", 1),), lease_until=1e12, started_at=0.0)


@dataclass
class Partition:
    waiting: int = 0
    held: int = 0
    turn: int = 1
    state: bytes = b""
    taken: int = 0
    limit: int | None = None
    ready_at: float | None = None
    override: PartitionOverride | None = None
    log: list[float] = field(default_factory=list)

    def is_ready(self, now: float) -> bool:
        below = self.limit is None or self.held < self.limit
        return self.waiting > 0 and below and (self.ready_at is None or self.ready_at <= now)


class QueueModel:
    """Applies plans, and fails as soon as a limit is exceeded. `served` lists the partitions in order of admission."""

    def __init__(self, settings: QueueSettings, override: QueueOverride | None = None, now: float = 1_000.0) -> None:
        self.declared = settings
        self.override = override or QueueOverride()
        self.paused: QueuePause | None = None
        self.partitions: dict[str, Partition] = {}
        self.version = 1
        self.state = b""
        self.taken = 0
        self.now = now
        self.log: list[float] = []
        self.served: list[str] = []
        self.last_turn = 0
        self.workers: tuple[WorkerRecord, ...] = (WORKER,)

    @property
    def settings(self) -> QueueSettings:
        return effective_settings(self.declared, self.override)

    @property
    def held(self) -> int:
        return sum(each.held for each in self.partitions.values())

    def start(self, count: int = 1, partition: str = "") -> None:
        if partition not in self.partitions:
            self.partitions[partition] = Partition(turn=self.last_turn + 1)
        self.partitions[partition].waiting += count

    def end(self, count: int, partition: str = "") -> None:
        found = self.partitions[partition]
        found.held -= min(count, found.held)

    def configure(self, settings: QueueSettings) -> None:
        self.declared = settings
        self.version += 1
        for each in self.partitions.values():
            each.limit = each.ready_at = None

    def view(self, limit: int = 100) -> QueueView:
        ready = [(name, each) for name, each in self.partitions.items() if each.is_ready(self.now)]
        ready.sort(key=lambda item: (item[1].turn, item[0]))
        return QueueView(
            name="q",
            version=self.version,
            state=self.state,
            declared=self.declared,
            override=self.override,
            paused=self.paused,
            held=self.held,
            active=self.held,
            taken=self.taken,
            partitions=tuple(
                PartitionView(
                    partition=name,
                    waiting=each.waiting,
                    held=each.held,
                    turn=each.turn,
                    state=each.state,
                    taken=each.taken,
                    override=each.override,
                )
                for name, each in ready[:limit]
            ),
        )

    def plan(self, limit: int = 100, slack: float | None = 0.0) -> AdmissionPlan:
        return plan(self.view(limit), self.workers, self.now, slack=slack)

    def admit(self, limit: int = 100, *, slack: float | None = 0.0, at: float | None = None, share: float = 1.0) -> int:
        """Plan, and apply the plan `at` a time of the store that may differ; take only a share of each count."""
        planned = self.plan(limit, slack)
        return 0 if planned.admit is None else self.apply(planned.admit, self.now if at is None else at, share)

    def apply(self, admit: Admit, at: float, share: float = 1.0) -> int:
        if admit.base != self.version:
            return 0
        self.version += 1
        self.state = admit.state
        self.taken = 0
        for take in admit.takes:
            found = self.partitions[take.partition]
            found.taken = min(found.waiting, int(take.count * share))
            found.waiting -= found.taken
            found.held += found.taken
            found.turn, found.state, found.limit, found.ready_at = take.turn, take.state, take.limit, take.ready_at
            found.log += [at] * found.taken
            self.last_turn = max(self.last_turn, take.turn)
            self.log += [at] * found.taken
            self.taken += found.taken
            self.served += [take.partition] * found.taken
        self._check(at)
        return self.taken

    def _check(self, at: float) -> None:
        settings = self.settings
        if self.taken and settings.concurrency is not None:
            assert self.held <= settings.concurrency
        check_log(settings.rate, self.log, at)
        for each in self.partitions.values():
            limits = partition_limits(settings, each.override)
            if each.taken and limits.concurrency is not None:
                assert each.held <= limits.concurrency
            check_log(limits.rate, each.log, at)


def check_log(rate: RateLimit | None, log: list[float], at: float) -> None:
    if rate is not None:
        begin = bisect.bisect_right(sorted(log), at - rate.per)
        assert len(log) - begin <= rate.limit, f"{len(log) - begin} admissions in {rate.per} s; {rate.limit} allowed"
