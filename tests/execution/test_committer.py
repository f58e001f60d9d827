"""The committer alone, over a store that answers when the test says so."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from perdure.clock import SystemClock
from perdure.execution.committer import RESULT_CHUNK, Committer
from perdure.retry import Retry
from perdure.stores.results import Committed, WriteResult
from perdure.stores.writes import ReleaseRun, Write


class Patient:
    """A store that does nothing: it keeps the batches, and answers each when it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gates: list[asyncio.Event] = []

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        self.batches.append([write.run_id for write in batch if isinstance(write, ReleaseRun)])
        self.gates.append(asyncio.Event())
        await self.gates[-1].wait()
        return [Committed() for _ in batch]

    async def let_go(self) -> None:
        """Answer the batch that is under way, and let everything happen that follows."""
        self.gates[-1].set()
        await rounds(20)


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def write_to(run_id: str) -> ReleaseRun:
    return ReleaseRun(run_id=run_id, worker="w", now=0.0)


@pytest.fixture
def store() -> Patient:
    return Patient()


def keep_in(told: list[int]) -> Callable[[int, object], None]:
    """Something to be told, which writes down whose answer it was."""
    return lambda number, answer: told.append(number)


def committer_over(store: Patient) -> Committer:
    committer = Committer(store, SystemClock(), Retry())  # type: ignore[arg-type]
    committer.start()
    return committer


def test_what_gathers_while_a_commit_is_under_way_is_the_next_one(store):
    async def test() -> None:
        committer = committer_over(store)
        for run_id in ("a", "b", "c"):
            committer.submit(write_to(run_id), lambda answer: None)
            await rounds(5)
        assert store.batches == [["a"]]
        await store.let_go()
        assert store.batches == [["a"], ["b", "c"]]
        await committer.stop()

    asyncio.run(test())


def test_part_of_a_large_batch_is_worked_on_while_another_is_committed(store):
    """Each answer leads to a write at once, as that of a turn does: half of them are under way before all are told."""
    size = 2 * RESULT_CHUNK - 10
    told: list[str] = []

    async def test() -> None:
        committer = committer_over(store)

        def go_on(run_id: str, answer: object) -> None:
            told.append(run_id)
            committer.submit(write_to(f"{run_id} again"), lambda answer: None)

        runs = [f"run-{number}" for number in range(size)]
        for run_id in runs:
            committer.submit(write_to(run_id), partial(go_on, run_id))
        await rounds(5)
        assert store.batches == [runs]
        store.gates[-1].set()
        while len(store.batches) == 1:
            await asyncio.sleep(0)
        assert store.batches[1] == [f"{run_id} again" for run_id in runs[: size // 2]]
        await rounds(5)
        assert told == runs
        await store.let_go()
        assert store.batches[2] == [f"{run_id} again" for run_id in runs[size // 2 :]]
        await committer.stop()

    asyncio.run(test())


def test_a_batch_is_handed_back_in_as_few_parts_as_may_be_and_none_is_much_smaller(store):
    sizes: list[int] = []

    async def test() -> None:
        committer = committer_over(store)
        told: list[int] = []
        keep = keep_in(told)
        for number in range(3 * RESULT_CHUNK + 1):
            committer.submit(write_to(str(number)), partial(keep, number))
        await rounds(5)
        store.gates[-1].set()
        before = 0
        while before < 3 * RESULT_CHUNK + 1:
            await asyncio.sleep(0)
            if len(told) > before:
                sizes.append(len(told) - before)
                before = len(told)
        assert told == list(range(3 * RESULT_CHUNK + 1))
        await committer.stop()

    asyncio.run(test())
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 1


def test_it_is_drained_when_the_last_answer_was_told(store):
    told: list[int] = []
    keep = keep_in(told)

    async def test() -> None:
        committer = committer_over(store)
        for number in range(3 * RESULT_CHUNK):
            committer.submit(write_to(str(number)), partial(keep, number))
        drained = asyncio.ensure_future(committer.wait_idle(within=60.0))
        await rounds(5)
        assert not drained.done()
        store.gates[-1].set()
        assert await drained
        assert len(told) == 3 * RESULT_CHUNK
        await committer.stop()

    asyncio.run(test())


def test_what_was_committed_is_told_even_if_the_committer_is_stopped_meanwhile(store):
    told: list[int] = []
    keep = keep_in(told)

    async def test() -> None:
        committer = committer_over(store)
        for number in range(2 * RESULT_CHUNK):
            committer.submit(write_to(str(number)), partial(keep, number))
        await rounds(5)
        store.gates[-1].set()
        while not told:
            await asyncio.sleep(0)
        assert len(told) == RESULT_CHUNK
        await committer.stop()
        await rounds(5)
        assert len(told) == 2 * RESULT_CHUNK

    asyncio.run(test())


def test_an_answer_that_cannot_be_handled_keeps_the_others_from_nothing(store, caplog):
    told: list[str] = []

    def fails(answer: object) -> None:
        raise ValueError("a defect")

    async def test() -> None:
        committer = committer_over(store)
        committer.submit(write_to("a"), fails)
        committer.submit(write_to("b"), lambda answer: told.append("b"))
        await rounds(5)
        await store.let_go()
        await committer.stop()

    asyncio.run(test())
    assert told == ["b"]
    assert "Callback for ReleaseRun result raised" in caplog.text
