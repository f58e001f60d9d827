"""The window of a rate, compared with an exact log of all admissions."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.model.queue_records import RateLimit
from perdure.queues.rate_window import SUB_WINDOWS, RateWindow

START = 1_790_000_000.0


class Trace:
    """Admissions through stored states. `lateness` is the worst one, compared with an exact log."""

    def __init__(self, rate: RateLimit, start: float = START) -> None:
        self.rate = rate
        self.state, self.taken = b"", 0
        self.log: list[float] = []
        self.lateness = 0.0
        self.now = start

    def window(self, slack: float = 0.0) -> RateWindow:
        return RateWindow(self.rate, self.state, self.taken, self.now, slack)

    def admit(self, count: int, *, slack: float = 0.0, differs: float = 0.0) -> None:
        """Admit so many now; the store's clock differs from the plan's time."""
        window = self.window(slack)
        assert count <= window.free
        self.state, self.taken = window.encode(), count
        self.log += [self.now + differs] * count
        self.check()

    def check(self) -> None:
        latest = self.log[-1] if self.log else self.now
        recent = [at for at in self.log if at > latest - self.rate.per]
        assert len(recent) <= self.rate.limit

    def wait_until_free(self) -> None:
        exact = self.now
        if len(self.log) >= self.rate.limit:
            exact = max(exact, self.log[-self.rate.limit] + self.rate.per)
        free_at = self.window().free_at()
        if free_at is not None:
            assert free_at > self.now
            self.now = free_at
        assert self.window().free > 0
        self.lateness = max(self.lateness, self.now - exact)


@pytest.mark.parametrize("seed", range(60))
def test_rate_is_never_exceeded_and_admissions_are_at_most_one_percent_late(seed):
    rng = random.Random(seed)
    rate = RateLimit(rng.choice([1, 2, 5, 10, 100, 500]), rng.choice([0.5, 1, 60, 3600]))
    trace = Trace(rate, start=rng.choice([0.0, START]))
    for _ in range(600):
        mean = rate.limit / rate.per
        trace.now += rng.choice([0, 0, 0, rng.expovariate(mean * 3), rng.expovariate(mean / 2)])
        before = trace.now
        trace.wait_until_free()
        trace.admit(1)
        if rng.random() < 0.5:
            trace.now = max(before, trace.now)
    assert trace.lateness <= rate.per / SUB_WINDOWS + 1e-5


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 50),
    st.sampled_from([0.01, 1.0, 60.0, 86_400.0]),
    st.lists(st.tuples(st.floats(0, 1.5), st.floats(0, 1), st.floats(-1, 1)), max_size=40),
)
def test_rate_is_never_exceeded_while_the_clock_of_the_store_differs_within_the_slack(limit, per, steps):
    trace = Trace(RateLimit(limit, per))
    slack = min(1.0, per / SUB_WINDOWS)
    for pause, share, differs in steps:
        trace.now += pause * per
        trace.admit(int(trace.window(slack).free * share), slack=slack, differs=differs * slack)


def test_an_idle_window_admits_the_whole_limit_at_once():
    trace = Trace(RateLimit(100, 60.0))
    assert trace.window().free == 100
    trace.admit(100)
    assert trace.window().free == 0
    trace.now = START + 59.9
    assert trace.window().free == 0
    trace.now = START + 60.6 + 1e-6
    assert trace.window().free == 100


def test_runs_that_were_not_taken_do_not_count():
    trace = Trace(RateLimit(10, 60.0))
    trace.admit(10)
    trace.taken = 4  # the store took fewer than planned
    assert trace.window().free == 6


def test_a_clock_that_was_set_back_delays_by_at_most_one_interval():
    trace = Trace(RateLimit(10, 60.0))
    trace.admit(10)
    trace.now = START - 3_600.0
    window = trace.window()
    assert window.free == 0
    free_at = window.free_at()
    assert free_at is not None
    assert free_at <= trace.now + 60.0 * 1.02


def test_a_clock_that_was_set_back_a_little_does_not_move_counts():
    trace = Trace(RateLimit(10, 60.0))
    trace.admit(10)
    trace.now = START - 0.3
    assert trace.window().free == 0
    trace.now = START + 60.7
    assert trace.window().free == 10


def test_a_longer_interval_keeps_the_admissions_that_still_count():
    trace = Trace(RateLimit(10, 1.0))
    trace.admit(7)
    trace.rate = RateLimit(10, 60.0)
    assert trace.window().free == 3
    trace.now = START + 59.0
    assert trace.window().free == 3
    trace.now = START + 62.0
    assert trace.window().free == 10


def test_a_lower_limit_admits_nothing_until_enough_admissions_have_left():
    trace = Trace(RateLimit(10, 60.0))
    for _ in range(10):
        trace.admit(1)
        trace.now += 3.0
    trace.rate = RateLimit(4, 60.0)
    window = trace.window()
    assert window.free == 0
    free_at = window.free_at()
    assert free_at is not None
    trace.now = free_at
    assert trace.window().free == 1
    trace.now = math.nextafter(free_at, 0) - 1e-3
    assert trace.window().free == 0


def test_time_of_the_next_admission_counts_planned_ones():
    window = Trace(RateLimit(2, 60.0)).window()
    assert window.free_at(1) is None
    free_at = window.free_at(2)
    assert free_at is not None
    assert START + 60.0 <= free_at <= START + 61.0


def test_state_is_small():
    trace = Trace(RateLimit(1_000_000, 86_400.0))
    for _ in range(500):
        trace.admit(1_000)
        trace.now += 200.0
    assert len(trace.state) < 800
