"""Admission of loaded runs: executed, released, held as poison, or kept in quarantine."""

from typing import Any

import pytest
from msgspec.structs import replace

from perdure import Context, EngineConfig, workflow
from perdure.execution.admission import NotAdmitted, RunAdmission
from perdure.execution.quarantine import Quarantine
from perdure.execution.run_cache import CachedRun, RunCache
from perdure.model.records import Hold, RunRecord
from perdure.testing.clock import VirtualClock


@workflow
async def admitted_run(ctx: Context) -> None: ...


class FakeLoader:
    """The state of a loader that admission reads."""

    def __init__(self) -> None:
        self.loading: set[str] = set()

    @property
    def loading_count(self) -> int:
        return len(self.loading)

    def is_loading(self, run_id: str) -> bool:
        return run_id in self.loading


class Fixture:
    """An admission with four slots, and the callbacks that it made."""

    def __init__(self, concurrency: int | None = None) -> None:
        self.started: list[str] = []
        self.freed = 0
        self.cache = RunCache(4)
        self.loader = FakeLoader()
        loader: Any = self.loader
        self.admission = RunAdmission(
            EngineConfig(max_recoveries=5),
            self.cache,
            loader,
            Quarantine(VirtualClock(), self.started.append, self.free),
            find_workflow=lambda name, version: admitted_run if name == "admitted_run" else None,
            on_slot_freed=self.free,
            concurrency=concurrency,
        )

    def free(self) -> None:
        self.freed += 1

    def activate(self, run_id: str) -> CachedRun:
        runner: Any = type("Runner", (), {"close": lambda self: None})()
        cached = CachedRun(record(run_id), admitted_run, runner, 0)
        self.cache.add(cached)
        return cached


def record(run_id: str, recoveries: int = 0, name: str = "admitted_run") -> RunRecord:
    created = RunRecord(
        id=run_id, workflow=name, version=1, input=b"{}", created_at=1.0, created_by="c", seed=1, pool="p"
    )
    return replace(created, recoveries=recoveries)


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def test_run_with_few_recoveries_executes(fixture):
    assert fixture.admission.decide(record("r", recoveries=2)) is admitted_run


def test_run_of_an_unknown_workflow_is_released(fixture):
    assert fixture.admission.decide(record("r", name="unknown")) is NotAdmitted.RELEASE


def test_draining_worker_releases_every_run(fixture):
    fixture.admission.draining = True
    assert fixture.admission.decide(record("r")) is NotAdmitted.RELEASE


def test_run_with_too_many_recoveries_is_held_as_poison(fixture):
    hold = fixture.admission.decide(record("r", recoveries=6))
    assert isinstance(hold, Hold)
    assert hold.kind == "poison"


def test_suspect_executes_when_the_active_runs_have_stopped(fixture):
    active = fixture.activate("active")
    assert fixture.admission.decide(record("suspect", recoveries=3)) is NotAdmitted.WAIT
    assert fixture.started == []
    fixture.cache.evict(active)
    fixture.admission.on_run_stopped("active")
    assert fixture.started == ["suspect"]
    assert fixture.admission.decide(record("suspect", recoveries=3)) is admitted_run


def test_second_suspect_is_released_and_runs_are_then_claimed_singly(fixture):
    assert fixture.admission.decide(record("first", recoveries=3)) is NotAdmitted.WAIT
    assert fixture.admission.decide(record("second", recoveries=3)) is NotAdmitted.RELEASE
    assert fixture.admission.free_slots == 0
    fixture.admission.on_run_stopped("first")
    assert fixture.admission.free_slots == 1
    assert fixture.admission.decide(record("healthy")) is admitted_run
    assert fixture.admission.free_slots == 4


def test_active_and_loading_runs_take_slots():
    fixture = Fixture(concurrency=3)
    assert fixture.admission.free_slots == 3
    fixture.activate("active")
    fixture.loader.loading.add("loading")
    assert fixture.admission.free_slots == 1
