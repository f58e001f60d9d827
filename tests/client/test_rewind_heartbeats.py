"""A rewind and a fork give no heartbeat of an earlier execution to a new one."""

from perdure.model.records import EntryStatus
from tests.client.test_rewind_plan import cancelled, fork, rewind, row

NOTES = b'{"heartbeat":7,"heartbeat_at":2.0}'
RUNNING = row("copy", 1, EntryStatus.PENDING, attempts=1, value=NOTES)


def test_a_cancelled_step_that_is_open_again_has_no_heartbeat():
    """The row with the heartbeat is still there: its worker died before the step was cancelled."""
    [opened] = rewind("b", RUNNING, row("b", 2), cancelled("copy", 1, at=3.0)).entries
    assert (opened.location, opened.status, opened.generation, opened.value) == ("copy", EntryStatus.PENDING, 4, None)


def test_a_step_that_keeps_running_keeps_its_heartbeat():
    plan = rewind("b", RUNNING, row("b", 2))
    assert (plan.dropped, plan.entries) == (("b",), ())


def test_a_fork_executes_a_running_step_without_its_heartbeat():
    [copied] = fork("b", RUNNING, row("b", 2)).entries
    assert (copied.location, copied.status, copied.value) == ("copy", EntryStatus.PENDING, None)
