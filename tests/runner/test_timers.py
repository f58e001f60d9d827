"""Alarms: the earliest that still stands, in order of due time and then of creation."""

from perdure.runner.timers import TimerQueue


def test_timer_that_is_set_again_replaces_its_due_time():
    alarms = TimerQueue()
    alarms.set("a", 10)
    alarms.set("a", 30)
    assert alarms.earliest() == 30
    assert alarms.pop_due(29) is None
    assert alarms.pop_due(30) == "a"
    assert alarms.pop_due(99) is None


def test_timers_fire_by_due_time_and_then_by_creation():
    alarms = TimerQueue()
    for name, due_at in (("b", 20), ("z", 10), ("a", 20), ("gone", 5)):
        alarms.set(name, due_at)
    alarms.remove("gone")
    assert [alarms.pop_due(99) for _ in range(4)] == ["z", "b", "a", None]
