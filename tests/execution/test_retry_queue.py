"""The retry queue alone: batches are split, merged and counted."""

from perdure.execution.retry_queue import UNAVAILABLE_AFTER, QueuedWrite, RetryQueue
from perdure.retry import Retry
from perdure.stores.writes import ReleaseRun

RETRY = Retry(max_attempts=4, initial=1.0, jitter=0)


def turn(run_id: str) -> QueuedWrite:
    return (ReleaseRun(run_id=run_id, worker="w", now=0.0), lambda result: None, None)


def call(run_id: str, left: int = RETRY.max_attempts) -> QueuedWrite:
    return (ReleaseRun(run_id=run_id, worker="w", now=0.0), lambda result: None, left)


def runs(writes: list[QueuedWrite]) -> list[str]:
    return [write.run_id for write, _, _ in writes if isinstance(write, ReleaseRun)]


def test_failed_batch_is_split_until_only_the_write_that_fails_is_left():
    queue = RetryQueue(RETRY, 100)
    committed: list[str] = []
    queue.add([turn(run_id) for run_id in "abcdefgh"])
    attempts = 0
    while len(queue) > 1:
        attempts += 1
        batch = queue.take()
        if "c" in runs(batch):
            assert queue.on_failed(batch) == []
        else:
            committed += runs(batch)
            queue.on_committed()
    assert sorted(committed) == list("abdefgh")
    assert attempts <= 2 * len(bin(8))


def test_writes_of_one_run_stay_in_order_in_one_batch():
    queue = RetryQueue(RETRY, 100)
    queue.add([turn("a"), turn("b"), turn("a")])
    assert runs(queue.hold_back([turn("c"), turn("b"), turn("a")])) == ["c"]
    assert [runs(queue.take()), runs(queue.take())] == [["a", "a", "a"], ["b", "b"]]


def test_caller_gives_up_after_its_attempts_and_a_turn_never():
    queue = RetryQueue(RETRY, 100)
    given_up = queue.add([call("a"), turn("b")])
    failed = 1
    while not given_up:
        failed += 1
        given_up = queue.on_failed(queue.take())
    assert runs(given_up) == ["a"]
    assert failed <= RETRY.max_attempts + UNAVAILABLE_AFTER
    for _ in range(100):
        assert queue.on_failed(queue.take()) == []
    assert len(queue) == 1


def test_failure_of_another_batch_does_not_count_while_writes_succeed():
    queue = RetryQueue(RETRY, 100)
    queue.add([turn("bad")])
    queue.add([call("a")])
    for number in range(100):
        assert queue.on_failed(queue.take()) == []
        if number == 0:
            assert runs(queue.take()) == ["a"]
            queue.on_committed()
    assert runs(queue.take()) == ["bad"]


def test_batches_are_merged_when_the_store_is_available_again():
    queue = RetryQueue(RETRY, 100)
    queue.add([turn(str(number)) for number in range(250)])
    for _ in range(300):
        queue.on_failed(queue.take())
    assert len(queue.take()) == 1
    queue.on_committed()
    assert sorted(len(queue.take()) for _ in range(3)) == [49, 100, 100]


def test_pause_is_that_of_the_caller_with_the_fewest_attempts():
    queue = RetryQueue(RETRY, 100)
    queue.add([turn("a")])
    for _ in range(5):
        queue.on_failed(queue.take())
    assert queue.delay(0.5) == 30.0
    queue.add([call("b")])
    assert queue.delay(0.5) == 1.0


def test_queue_that_its_callers_have_left_is_not_retrying():
    queue = RetryQueue(RETRY, 100)
    assert runs(queue.add([call("a", left=1)])) == ["a"]
    assert (len(queue), queue.attempts) == (0, 0)
