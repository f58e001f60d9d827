"""The committer alone, over a store that returns results when the test releases them."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from perdure.clock import SystemClock
from perdure.execution.committer import RESULT_CHUNK, Committer
from perdure.retry import Retry
from perdure.stores.results import Committed, WriteResult
from perdure.stores.writes import ReleaseRun, Write


class GatedStore:
    """A store that records the batches and returns the result of each when the test releases it."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gates: list[asyncio.Event] = []

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        self.batches.append([write.run_id for write in batch if isinstance(write, ReleaseRun)])
        self.gates.append(asyncio.Event())
        await self.gates[-1].wait()
        return [Committed() for _ in batch]

    async def release(self) -> None:
        """Return the result of the batch in flight, and run the event loop until it is idle."""
        self.gates[-1].set()
        await rounds(20)


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def write_to(run_id: str) -> ReleaseRun:
    return ReleaseRun(run_id=run_id, worker="w", now=0.0)


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


def recorder(received: list[int]) -> Callable[[int, object], None]:
    """Return a callback that records the number of the write whose result it receives."""
    return lambda number, result: received.append(number)


def committer_over(store: GatedStore) -> Committer:
    committer = Committer(store, SystemClock(), Retry())  # type: ignore[arg-type]
    committer.start()
    return committer


def test_writes_submitted_during_a_commit_form_the_next_batch(store):
    async def test() -> None:
        committer = committer_over(store)
        for run_id in ("a", "b", "c"):
            committer.submit(write_to(run_id), lambda result: None)
            await rounds(5)
        assert store.batches == [["a"]]
        await store.release()
        assert store.batches == [["a"], ["b", "c"]]
        await committer.stop()

    asyncio.run(test())


def test_results_of_a_large_batch_are_delivered_in_chunks_while_the_next_commit_runs(store):
    """Each result submits a write, as a turn does: half of them are committed before all results are delivered."""
    size = 2 * RESULT_CHUNK - 10
    received: list[str] = []

    async def test() -> None:
        committer = committer_over(store)

        def submit_next(run_id: str, result: object) -> None:
            received.append(run_id)
            committer.submit(write_to(f"{run_id} again"), lambda result: None)

        runs = [f"run-{number}" for number in range(size)]
        for run_id in runs:
            committer.submit(write_to(run_id), partial(submit_next, run_id))
        await rounds(5)
        assert store.batches == [runs]
        store.gates[-1].set()
        while len(store.batches) == 1:
            await asyncio.sleep(0)
        assert store.batches[1] == [f"{run_id} again" for run_id in runs[: size // 2]]
        await rounds(5)
        assert received == runs
        await store.release()
        assert store.batches[2] == [f"{run_id} again" for run_id in runs[size // 2 :]]
        await committer.stop()

    asyncio.run(test())


def test_results_are_delivered_in_the_fewest_chunks_of_about_equal_size(store):
    sizes: list[int] = []

    async def test() -> None:
        committer = committer_over(store)
        received: list[int] = []
        keep = recorder(received)
        for number in range(3 * RESULT_CHUNK + 1):
            committer.submit(write_to(str(number)), partial(keep, number))
        await rounds(5)
        store.gates[-1].set()
        before = 0
        while before < 3 * RESULT_CHUNK + 1:
            await asyncio.sleep(0)
            if len(received) > before:
                sizes.append(len(received) - before)
                before = len(received)
        assert received == list(range(3 * RESULT_CHUNK + 1))
        await committer.stop()

    asyncio.run(test())
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 1


def test_committer_is_idle_after_the_last_result_is_delivered(store):
    received: list[int] = []
    keep = recorder(received)

    async def test() -> None:
        committer = committer_over(store)
        for number in range(3 * RESULT_CHUNK):
            committer.submit(write_to(str(number)), partial(keep, number))
        idle = asyncio.ensure_future(committer.wait_idle(within=60.0))
        await rounds(5)
        assert not idle.done()
        store.gates[-1].set()
        assert await idle
        assert len(received) == 3 * RESULT_CHUNK
        await committer.stop()

    asyncio.run(test())


def test_results_of_committed_writes_are_delivered_after_a_stop(store):
    received: list[int] = []
    keep = recorder(received)

    async def test() -> None:
        committer = committer_over(store)
        for number in range(2 * RESULT_CHUNK):
            committer.submit(write_to(str(number)), partial(keep, number))
        await rounds(5)
        store.gates[-1].set()
        while not received:
            await asyncio.sleep(0)
        assert len(received) == RESULT_CHUNK
        await committer.stop()
        await rounds(5)
        assert len(received) == 2 * RESULT_CHUNK

    asyncio.run(test())


def test_callback_that_raises_does_not_affect_other_callbacks(store, caplog):
    received: list[str] = []

    def fails(result: object) -> None:
        raise ValueError("a defect")

    async def test() -> None:
        committer = committer_over(store)
        committer.submit(write_to("a"), fails)
        committer.submit(write_to("b"), lambda result: received.append("b"))
        await rounds(5)
        await store.release()
        await committer.stop()

    asyncio.run(test())
    assert received == ["b"]
    assert "Callback for ReleaseRun result raised" in caplog.text
