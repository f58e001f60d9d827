"""TimerQueue: pending timers in order of due time and then of creation."""

from perdure.runner.timers import TimerQueue


def test_timer_that_is_set_again_replaces_its_due_time():
    timers = TimerQueue()
    timers.set("a", 10)
    timers.set("a", 30)
    assert timers.earliest() == 30
    assert timers.pop_due(29) is None
    assert timers.pop_due(30) == "a"
    assert timers.pop_due(99) is None


def test_timers_fire_by_due_time_and_then_by_creation():
    timers = TimerQueue()
    for name, due_at in (("b", 20), ("z", 10), ("a", 20), ("missing", 5)):
        timers.set(name, due_at)
    timers.remove("missing")
    assert [timers.pop_due(99) for _ in range(4)] == ["z", "b", "a", None]
