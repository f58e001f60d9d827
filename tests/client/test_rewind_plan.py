"""The history that a rewind or a fork keeps, rule by rule on literal rows, and for random histories."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from perdure.client.rewind import plan_fork, plan_rewind
from perdure.errors import InvalidArgument
from perdure.model.records import Entry, EntryStatus, ErrorRecord, Hold, Message, RunRecord, RunStatus, Wait
from perdure.stores.results import Snapshot
from perdure.stores.writes import CreateRun, RewindRun
from tests.runner.turn_driver import BEGUN_AT, CLOCK, Context, Play

PENDING, SUCCEEDED, FAILED, CANCELLED = EntryStatus
NOW = 1000.0


def row(location: str, call: int, status: EntryStatus = SUCCEEDED, *, kind: str = "step", **fields) -> Entry:
    """A row requested at second `call`. A succeeded one completed a second later, as completion number `call`."""
    if status in (SUCCEEDED, FAILED):
        fields = {"seq": call, "settled_at": call + 1.0, **fields}
    if status is SUCCEEDED:
        fields = {"value": b"1", **fields}
    fields = {"ordinal": call, "started_at": float(call), **fields}
    return Entry(location, kind, location.rpartition("/")[2], status, call, **fields)


def aside(location: str, call: int, kind: str, **fields) -> Entry:
    """A row outside the order of its scope."""
    return row(location, call, kind=kind, ordinal=-1, **fields)


def cancelled(location: str, call: int, at: float, **fields) -> Entry:
    return row(location, call, CANCELLED, settled_at=at, **fields)


def detail(value: object) -> bytes:
    return msgspec.json.encode(value)


def message(number: int, kind: str = "event", **fields) -> Message:
    return Message(id=f"m{number}", kind=kind, number=number, name="Paid", body=f"{number}".encode(), **fields)


def snapshot(*rows: Entry, inbox: tuple[Message, ...] = (), **fields) -> Snapshot:
    given: dict[str, Any] = {
        "id": "r",
        "workflow": "w",
        "version": 1,
        "input": b"[]",
        "created_at": 0.0,
        "created_by": "c",
        "seed": 7,
    }
    record = RunRecord(**{**given, "first_executed_at": 0.5, "generation": 3, **fields})
    return Snapshot(record, 40, rows, inbox)


def rewind(location: str, *rows: Entry, **fields) -> RewindRun:
    """The planned write without the rewind marker: see `test_clock_continues_from_the_rewind`."""
    return unmarked(plan_rewind(snapshot(*rows, **fields), location, now=NOW, turn_id="t"))


def fork(location: str, *rows: Entry, **fields) -> CreateRun:
    return unmarked(plan_fork(snapshot(*rows, **fields), location, run_id="f", created_by="me", shard=9, now=NOW))


def unmarked(plan: Any) -> Any:
    *entries, mark = plan.entries
    assert mark.kind == "rewind"
    return replace(plan, entries=tuple(entries))


@pytest.mark.parametrize(("location", "after"), [("first", "0"), ("second", "4"), ("third", "9")])
def test_clock_continues_from_the_rewind(location, after):
    rows = [row("first", 1, seq=4), row("second", 2, seq=9), row("third", 3)]
    mark = plan_rewind(snapshot(*rows), location, now=NOW, turn_id="t").entries[-1]
    assert (mark.location, mark.kind, mark.name, mark.settled_at) == ("~rewind/4", "rewind", after, NOW)
    forked = plan_fork(snapshot(*rows), location, run_id="f", created_by="me", shard=9, now=NOW)
    assert forked.entries[-1] == mark


# --- dropped and kept entries


def test_rewind_drops_everything_requested_at_or_after_the_location():
    plan = rewind("b", row("a", 1), row("b", 2), row("c", 3))
    assert plan == RewindRun(run_id="r", base=40, turn_id="t", now=NOW, dropped=("b", "c"))


def test_rewind_cuts_by_call_order_and_not_by_name_or_position():
    rows = [row("x/late", 5), row("z", 1), row("x/early", 2), row("x", 4), row("a", 3, PENDING)]
    assert rewind("a", *rows).dropped == ("a", "x", "x/late")


def test_rewind_uses_the_latest_row_of_a_location():
    rows = [row("a", 1, PENDING), row("b", 2, PENDING), row("a", 1), row("b", 2)]
    assert rewind("b", *rows).dropped == ("b",)


def test_entry_requested_before_and_completed_after_the_location_stays_completed():
    plan = rewind("b", row("a", 1, settled_at=99.0, seq=8), row("b", 2))
    assert (plan.dropped, plan.entries) == (("b",), ())


def test_external_entries_are_cut_by_call_order_too():
    rows = [
        row("a", 1),
        aside("~timer", 2, "timer"),
        row("b", 3),
        aside("~timer#1", 4, "timer"),
        aside("race", 5, "race"),
        aside("~version/gate", 6, "version", seq=None),
        aside("~compensation/0", 7, "compensation", seq=None),
        aside("~cancel", 8, "cancel"),
    ]
    dropped = ("b", "~timer#1", "race", "~version/gate", "~compensation/0", "~cancel")
    assert rewind("b", *rows).dropped == dropped


def test_run_can_be_rewound_to_a_cancel():
    plan = rewind("~cancel", row("a", 1), aside("~cancel", 2, "cancel"), row("~children", 3, kind="stop_children"))
    assert plan.dropped == ("~cancel", "~children")


def test_rewind_drops_the_entries_of_cleanup():
    rows = [row("a", 1), row("b", 2, FAILED), row("~children", 3), row("~rollback/r", 4), row("~exit/e", 5)]
    assert rewind("b", *rows).dropped == ("b", "~children", "~rollback/r", "~exit/e")


# --- refused locations


def test_unknown_location_is_refused_with_similar_ones():
    with pytest.raises(InvalidArgument, match=r"run 'r' has no entry at 'charg'; there are 'charge'") as refused:
        rewind("charg", row("charge", 1), row("sleep", 2))
    assert "sleep" not in str(refused.value)


def test_unknown_location_is_refused_with_the_last_ones_if_none_is_similar():
    with pytest.raises(InvalidArgument, match=r"there are 'a2', 'a3', 'a4', 'a5', 'a6'$"):
        rewind("somewhere else", *(row(f"a{n}", n) for n in range(7)))


def test_rewind_of_an_empty_history_is_refused():
    with pytest.raises(InvalidArgument, match="its history is empty"):
        rewind("a")


def test_fork_refuses_the_same_locations():
    with pytest.raises(InvalidArgument, match="no entry at 'b'"):
        fork("b", row("a", 1))


# --- loops


def loop_rows(*, status: EntryStatus = SUCCEEDED) -> list[Entry]:
    """A loop with three iterations of one step each, the last two with a recorded state; then a step."""
    return [
        row("pages", 1, PENDING, kind="loop", ordinal=0),
        row("pages/~0/get", 2, ordinal=0),
        aside("pages/~1", 3, "iteration", value=b"state 1"),
        row("pages/~1/get", 4, ordinal=0),
        aside("pages/~2", 5, "iteration", value=b"state 2"),
        row("pages/~2/get", 6, ordinal=0),
        row("pages", 1, status, kind="loop", ordinal=0, seq=7 if status is SUCCEEDED else None, detail=b"{}"),
        row("after", 8, ordinal=1),
    ]


def test_ended_loop_continues_from_the_iteration_it_is_rewound_to():
    plan = rewind("pages/~1/get", *loop_rows())
    assert plan.dropped == ("pages/~1/get", "pages/~2", "pages/~2/get", "after")
    [loop] = plan.entries
    assert loop == row("pages", 1, PENDING, kind="loop", ordinal=0, detail=b"{}")


def test_failed_or_cancelled_loop_is_opened_again():
    error = ErrorRecord("ValueError", "no")
    failed = row("pages", 1, FAILED, kind="loop", error=error)
    for end in (failed, cancelled("pages", 1, 9.0, kind="loop")):
        [loop] = rewind("pages/~0/get", end, row("pages/~0/get", 2)).entries
        assert loop == row("pages", 1, PENDING, kind="loop")


def test_open_loop_is_not_rewritten():
    assert rewind("pages/~1/get", *loop_rows(status=PENDING)).entries == ()


def test_ended_loop_before_the_cut_stays_ended():
    plan = rewind("after", *loop_rows())
    assert (plan.dropped, plan.entries) == (("after",), ())


def test_loop_with_a_similar_name_is_another_loop():
    rows = [row("pages", 1, kind="loop"), row("pages#1", 2, kind="loop"), row("pages#1/~0/get", 3)]
    assert [entry.location for entry in rewind("pages#1/~0/get", *rows).entries] == ["pages#1"]


def test_loop_in_another_branch_is_opened_if_the_cut_goes_through_it():
    rows = [
        row("join/a/pages", 1, kind="loop", seq=6),
        row("join/a/pages/~0/get", 2),
        row("join/b/work", 3),
        aside("join/a/pages/~1", 4, "iteration"),
        row("join/a/pages/~1/get", 5),
    ]
    plan = rewind("join/b/work", *rows)
    assert plan.dropped == ("join/b/work", "join/a/pages/~1", "join/a/pages/~1/get")
    assert [entry.location for entry in plan.entries] == ["join/a/pages"]


def test_both_of_two_nested_loops_are_opened():
    rows = [row("l", 1, kind="loop"), row("l/~0/m", 2, kind="loop"), row("l/~0/m/~0/x", 3), row("l/~0/y", 4)]
    assert [entry.location for entry in rewind("l/~0/m/~0/x", *rows).entries] == ["l", "l/~0/m"]
    assert [entry.location for entry in rewind("l/~0/y", *rows).entries] == ["l"]


def test_rewind_to_an_iteration_keeps_its_state():
    plan = rewind("pages/~1", *loop_rows())
    assert plan.dropped == ("pages/~1/get", "pages/~2", "pages/~2/get", "after")
    assert [entry.location for entry in plan.entries] == ["pages"]


def test_rewind_to_a_loop_drops_everything_in_it():
    plan = rewind("pages", *loop_rows())
    assert (len(plan.dropped), plan.entries) == (7, ())


def pruned_rows(*states: int) -> list[Entry]:
    """A pruned loop: one entry of iteration 3 is left, and iterations with recorded states follow."""
    rows = [row("pages", 1, PENDING, kind="loop"), row("pages/~3/send", 10, PENDING, kind="send")]
    for state in states:
        rows += [aside(f"pages/~{state}", 10 * state, "iteration"), row(f"pages/~{state}/get", 10 * state + 1)]
    return rows


@pytest.mark.parametrize("states", [(50,), (50, 51, 52), (40, 60)])
@pytest.mark.parametrize("location", ["pages/~3/get", "pages/~3", "pages/~3/send", "pages/~39/get"])
def test_pruned_iteration_is_refused(location, states):
    oldest = rf"'pages' has been pruned; use iteration {states[0]} or later, or 'pages', the loop's beginning"
    with pytest.raises(InvalidArgument, match=oldest):
        rewind(location, *pruned_rows(*states))


def test_iteration_after_the_pruned_ones_is_accepted():
    assert rewind("pages/~51/get", *pruned_rows(50, 51)).dropped == ("pages/~51/get",)


def test_pruned_iteration_around_another_loop_is_refused():
    rows = [*pruned_rows(50, 51), row("pages/~3/inner", 5, kind="loop"), row("pages/~3/inner/~0/x", 6)]
    with pytest.raises(InvalidArgument, match="iteration 3 of the loop 'pages'"):
        rewind("pages/~3/inner/~0/x", *rows)


def test_iteration_before_the_first_recorded_state_is_accepted_if_nothing_was_pruned():
    rows = [row("l", 1, kind="loop"), *(row(f"l/~{n}/x", 2 + n) for n in range(10))]
    assert rewind("l/~4/x", *rows).dropped == tuple(f"l/~{n}/x" for n in range(4, 10))
    one_state = [*rows, aside("l/~10", 20, "iteration")]
    assert rewind("l/~4/x", *one_state).dropped[0] == "l/~4/x"
    two_states = [*one_state[:1], *one_state[4:], aside("l/~20", 21, "iteration")]  # the first had nothing to record
    assert rewind("l/~4/x", *two_states).dropped[0] == "l/~4/x"


def test_rewind_to_a_version_pin_set_on_a_replay_keeps_the_request_before_it():
    plan = rewind("~version/gate", row("a", 1), aside("~version/gate", 1, "version"), row("b", 2))
    assert plan.dropped == ("~version/gate", "b")


def test_loop_beside_the_location_continues_from_its_last_kept_state():
    rows = [row("l", 1, kind="loop"), aside("l/~4", 2, "iteration"), row("x", 3), aside("l/~5", 4, "iteration")]
    assert rewind("x", *rows).dropped == ("x", "l/~5")
    with pytest.raises(InvalidArgument, match="the loop 'l' had done by then have been pruned"):
        rewind("x", *rows[:1], *rows[2:], row("l/~5/y", 5))


def test_branch_named_like_an_iteration_is_not_an_iteration():
    with pytest.raises(InvalidArgument, match="no entry at"):
        rewind("join/~3/x", row("join", 1, kind="race"), aside("join/~50", 2, "iteration"))


# --- cancelled entries


def test_entry_cancelled_after_the_location_is_open_again_as_before():
    rows = [
        row("sleep", 1, PENDING, kind="sleep", due_at=77.0),
        row("b", 2),
        cancelled("sleep", 1, 5.0, kind="sleep"),
    ]
    plan = rewind("b", *rows)
    assert plan.entries == (row("sleep", 1, PENDING, kind="sleep", due_at=77.0, generation=4),)


def test_step_cancelled_before_its_first_write_is_pending():
    plan = rewind("b", cancelled("a", 1, 5.0, fingerprint=b"f"), row("b", 2))
    assert plan.entries == (row("a", 1, PENDING, fingerprint=b"f", generation=4),)


def test_reopened_step_keeps_its_attempts_and_the_time_of_the_next():
    waiting = row("a", 1, PENDING, attempts=2, due_at=50.0, error=ErrorRecord("OSError", "unavailable"))
    plan = rewind("b", row("a", 1, PENDING), waiting, row("b", 2), cancelled("a", 1, 5.0, attempts=2))
    assert plan.entries == (replace(waiting, generation=4),)


def test_reopened_entry_keeps_the_detail_recorded_since():
    rows = [row("run", 1, PENDING, kind="child"), row("b", 2), cancelled("run", 1, 5.0, kind="child", detail=b"{}")]
    assert rewind("b", *rows).entries == (row("run", 1, PENDING, kind="child", detail=b"{}", generation=4),)
    rows = [row("run", 1, PENDING, kind="child", detail=b"{}"), row("b", 2), cancelled("run", 1, 5.0, kind="child")]
    assert rewind("b", *rows).entries == (row("run", 1, PENDING, kind="child", detail=b"{}", generation=4),)


def test_entry_cancelled_before_the_location_stays_cancelled():
    rows = [row("a", 1, PENDING), cancelled("a", 1, 1.5), row("b", 2)]
    assert rewind("b", *rows).entries == ()


def test_entry_cancelled_at_the_time_of_the_location_is_opened():
    assert len(rewind("b", cancelled("a", 1, 2.0), row("b", 2)).entries) == 1


def test_loop_whose_body_raised_after_the_location_is_opened():
    rows = [
        row("pages", 1, PENDING, kind="loop"),
        row("b", 2),
        row("pages", 1, FAILED, kind="loop", seq=None, settled_at=5.0, error=ErrorRecord("ValueError", "no")),
    ]
    assert rewind("b", *rows).entries == (row("pages", 1, PENDING, kind="loop", generation=4),)


@pytest.mark.parametrize("kind", ["sleep", "send", "outcome", "child", "publish"])
def test_entry_requested_and_cancelled_in_one_turn_is_opened_from_its_only_row(kind):
    plan = rewind("b", cancelled("a", 1, 5.0, kind=kind), row("b", 2))
    assert plan.entries == (row("a", 1, PENDING, kind=kind, generation=4),)


def test_compensation_record_is_never_opened():
    assert rewind("b", cancelled("~compensation/a", 1, 5.0, kind="compensation"), row("b", 2)).entries == ()


def test_cancelled_run_is_open_again_before_its_cancel():
    rows = [
        row("receive", 1, PENDING, kind="receive"),
        aside("~cancel", 3, "cancel"),
        cancelled("receive", 1, 3.0, kind="receive"),
    ]
    reopened = row("receive", 1, PENDING, kind="receive")
    assert rewind("~cancel", *rows).entries == (reopened,), "under its old generation: it has to subscribe anew"


# --- compensation


def compensating(location: str, call: int, of: str | None, status: EntryStatus = SUCCEEDED) -> Entry:
    return row(location, call, status, detail=detail({"of": of}))


@pytest.mark.parametrize("location", ["~rollback/refund", "~rollback#2/refund", "a/~rollback/refund#1"])
def test_compensated_step_is_executed_again_with_its_completion_number(location):
    charge = row("charge", 1, attempts=2, fingerprint=b"f", settled_at=1.5, seq=5)
    plan = rewind("b", charge, row("b", 2, FAILED), compensating(location, 3, "charge"))
    assert plan.dropped == ("b", location)
    assert plan.entries == (row("charge", 1, PENDING, seq=5, fingerprint=b"f", generation=4),)


@pytest.mark.parametrize("status", [PENDING, FAILED, CANCELLED])
def test_step_whose_compensation_did_not_succeed_is_not_repeated(status):
    plan = rewind(
        "b", row("charge", 1, seq=5), row("b", 2, FAILED), compensating("~rollback/refund", 3, "charge", status)
    )
    assert plan.entries == ()


def test_step_whose_rollback_is_kept_is_not_repeated():
    plan = rewind("b", row("charge", 1), compensating("~rollback/refund", 2, "charge"), row("b", 3))
    assert plan.entries == ()


@pytest.mark.parametrize(
    "left",
    [row("charge", 1, FAILED), row("charge", 1, PENDING, seq=1), row("other", 1)],
    ids=["failed", "pending", "missing"],
)
def test_only_a_succeeded_step_is_executed_again(left):
    assert rewind("b", left, row("b", 2), compensating("~rollback/refund", 3, "charge")).entries == ()


def test_dropped_step_is_not_rewritten():
    plan = rewind("charge", row("a", 1), row("charge", 2), compensating("~rollback/refund", 3, "charge"))
    assert (plan.dropped, plan.entries) == (("charge", "~rollback/refund"), ())


def test_rollback_that_compensates_no_step_repeats_none():
    rows = [row("a", 1), row("b", 2), compensating("~rollback/tidy", 3, None), row("~rollback/bare", 4)]
    assert rewind("b", *rows).entries == ()


def test_detail_of_other_entries_is_not_read_as_a_rollback():
    rows = [row("a", 1), row("b", 2), compensating("rollback/x", 3, "a"), compensating("~rollback", 4, "a")]
    assert rewind("b", *rows).entries == ()


def test_compensated_step_in_the_continued_iteration_is_executed_again():
    rows = [*loop_rows(status=PENDING)[:6], row("pages/~2/put", 7), compensating("~rollback/x", 9, "pages/~2/get")]
    plan = rewind("pages/~2/put", *rows)
    assert [(entry.location, entry.status, entry.seq) for entry in plan.entries] == [("pages/~2/get", PENDING, 6)]


def test_compensated_step_in_a_cancelled_loop_is_executed_again():
    rows = [cancelled("pages", 1, 4.0, kind="loop"), row("pages/~0/get", 2), row("b", 5)]
    plan = rewind("b", *rows, compensating("~rollback/x", 9, "pages/~0/get"))
    assert [(entry.location, entry.status, entry.seq) for entry in plan.entries] == [("pages/~0/get", PENDING, 2)]


@pytest.mark.parametrize(
    ("rows", "location"),
    [
        (loop_rows(status=PENDING), "pages/~2/get"),  # the replay starts at iteration 2
        (loop_rows(), "after"),  # the loop is over
        ([*loop_rows()[:1], *loop_rows()[4:]], "after"),  # pruned
    ],
)
def test_rewind_is_refused_if_a_compensated_step_is_not_replayed(rows, location):
    with pytest.raises(
        InvalidArgument, match=r"step 'pages/~1/get' before it was rolled back and cannot be executed again"
    ):
        rewind(location, *rows, compensating("~rollback/x", 9, "pages/~1/get"))


def compensation(key: str, call: int, status: EntryStatus = SUCCEEDED) -> Entry:
    return Entry(f"~compensation/{key}", "compensation", "refund", status, call, detail=b"{}")


def test_compensation_executed_after_the_location_is_due_again():
    struck = replace(compensation("pages/~0/~on_rollback", 1, CANCELLED), detail=b'{"taken_by": ""}')
    rows = [compensation("pages/~0/~on_rollback", 1), row("b", 2, FAILED), struck]
    assert rewind("b", *rows).entries == (compensation("pages/~0/~on_rollback", 1),)


def test_compensation_executed_before_the_location_stays_done():
    rows = [compensation("pages/~0/~on_rollback", 1), compensation("pages/~0/~on_rollback", 1, CANCELLED), row("b", 2)]
    assert rewind("b", *rows).entries == ()


def test_carried_over_compensations_are_always_kept():
    rows = [
        compensation("~before/1", 1),
        compensation("~before/2", 2),
        row("a", 1),
        compensation("x", 2),
        compensation("~before/2", 2, CANCELLED),
    ]
    plan = rewind("a", *rows)
    assert (plan.dropped, plan.entries) == (("a", "~compensation/x"), (compensation("~before/2", 2),))


# --- messages


def receive(
    location: str, call: int, *messages: Message, kind: str = "receive", status: EntryStatus = SUCCEEDED
) -> Entry:
    return row(location, call, status, kind=kind, detail=detail(list(messages)))


def test_events_received_after_the_location_are_unread_again_in_order():
    plan = rewind(
        "b",
        receive("receive", 1, message(1)),
        row("b", 2),
        receive("receive#1", 3, message(9), message(4), kind="receive_batch"),
        receive("receive#2", 4, message(2, wants_reply=True), kind="receive_request"),
        receive("receive#3", 5, message(3), status=FAILED),
    )
    assert plan.returned == (message(2, wants_reply=True), message(3), message(4), message(9))


def test_event_of_a_topic_returns_to_the_inbox_of_the_run():
    assigned = message(5, "assignment", target="3:receive", offset=12, expires_at=2000.0, sender="s")
    plan = rewind("receive", receive("receive", 1, assigned))
    assert plan.returned == (message(5, expires_at=2000.0, sender="s"),)


def test_completed_deferred_stays_completed():
    done = message(5, "deferred")
    assert rewind("d", receive("d", 1, done, kind="deferred")).returned == (done,)


def test_other_messages_and_details_are_not_returned():
    rows = [
        receive("receive", 1, message(1, "cancel"), message(2, "child")),
        row("receive#1", 2, PENDING, kind="receive", detail=b'{"names": []}'),
        row("receive#2", 3, CANCELLED, kind="receive", detail=b'{"names": []}'),
        row("receive#3", 4, FAILED, kind="receive"),
        receive("step", 5, message(3), kind="step"),
    ]
    assert rewind("receive", *rows).returned == ()


# --- children


def child(
    location: str, call: int, id: str, status: EntryStatus = SUCCEEDED, *, attached: bool = True, **fields
) -> Entry:
    fields = {"kind": "start_child", **fields}
    return row(location, call, status, detail=detail({"id": id, "attached": attached}), **fields)


def test_attached_children_started_after_the_location_are_stopped():
    plan = rewind(
        "b",
        child("before", 1, "kept"),
        row("b", 2),
        child("one", 3, "c1", PENDING, kind="child"),
        child("two", 4, "c2"),
        child("two#1", 5, "c2"),
        child("three", 6, "free", attached=False),
        child("four", 7, "taken", FAILED),
        row("five", 8, PENDING, kind="start_child"),
        row("six", 9, kind="child", detail=detail({"id": "done", "status": "succeeded"})),
        row("ended", 20, PENDING),
    )
    stop = Entry("~stop/4/0", "stop", "c1", PENDING, 21, generation=4, started_at=NOW)
    assert plan.entries == (stop, replace(stop, location="~stop/4/1", name="c2", call_seq=22))


def test_unexecuted_stop_is_requested_again():
    rows = [row("a", 1), row("b", 2), aside("~stop/3/0", 30, "stop")]
    open_stop = Entry("~stop/3/1", "stop", "c1", PENDING, 31, generation=3)
    plan = rewind("b", *rows, open_stop)
    assert plan.dropped == ("b", "~stop/3/0", "~stop/3/1")
    assert [(entry.location, entry.name, entry.call_seq) for entry in plan.entries] == [("~stop/4/0", "c1", 32)]


# --- forks


def test_fork_has_the_kept_and_the_rewritten_rows():
    rows = loop_rows()
    made = fork("pages/~1/get", *rows)
    assert made.entries == (*rows[:3], rows[6], row("pages", 1, PENDING, kind="loop", ordinal=0, detail=b"{}"))


def test_record_of_a_fork_is_new_but_replays_like_the_old_one():
    made = fork(
        "a",
        row("a", 1),
        status=RunStatus.FAILED,
        error=ErrorRecord("ValueError", "no"),
        result=b"1",
        epoch=2,
        run_attempt=3,
        original_workflow="v",
        original_input=b"[0]",
        parent="p",
        attached=True,
        tags={"k": "v"},
        pool="gpu",
        ended_at=9.0,
        owner="w",
        recoveries=4,
        deadline_at=60.0,
        retention=5.0,
        waits=(Wait("timer"),),
        held=Hold("deadlock", "why"),
        drift=("a",),
        last_message_no=7,
        fence=30,
    )
    kept: dict[str, Any] = {
        "workflow": "w",
        "version": 1,
        "input": b"[]",
        "seed": 7,
        "epoch": 2,
        "first_executed_at": 0.5,
        "retention": 5.0,
    }
    kept |= {"run_attempt": 3, "original_workflow": "v", "original_input": b"[0]", "tags": {"k": "v"}, "pool": "gpu"}
    new: dict[str, Any] = {
        "id": "f",
        "created_by": "me",
        "shard": 9,
        "created_at": NOW,
        "updated_at": NOW,
        "wake_at": NOW,
    }
    assert made.record == RunRecord(**kept, **new, generation=4, deadline_at=NOW + 60.0)


def test_fork_gets_the_messages_of_the_dropped_part_and_the_unread_ones():
    unread = (message(3), message(5, "assignment"), message(6, "cancel"), message(7, "deferred"), message(8, "child"))
    made = fork(
        "receive",
        receive("receive", 1, message(4), message(2, "assignment", offset=3)),
        inbox=unread,
        last_message_no=8,
    )
    expected = [("m2", "event"), ("m3", "event"), ("m4", "event"), ("m7", "deferred")]
    assert [(each.id, each.kind) for each in made.inbox] == expected
    assert made.inbox[0].offset == 0
    assert made.received == 8


def test_fork_stops_no_children():
    stop = Entry("~stop/3/0", "stop", "c1", PENDING, 1)
    made = fork("b", stop, row("a", 2), row("b", 3), child("c", 4, "c2"))
    assert [entry.location for entry in made.entries] == ["a"]


def test_fork_executes_compensated_steps_again():
    made = fork("b", row("charge", 1), row("b", 2), compensating("~rollback/refund", 3, "charge"))
    assert made.entries == (row("charge", 1), row("charge", 1, PENDING, seq=1, generation=4))


# --- the kept history replays: plans against the runner


async def raced(ctx: Context) -> str:
    slow = asyncio.create_task(ctx.step("slow", lambda: "slow"))
    nap = asyncio.create_task(ctx.sleep(500))
    await asyncio.sleep(0)  # both branches have made their request
    await ctx.step("first", lambda: 1)
    await ctx.step("second", lambda: 2)
    nap.cancel()
    return await slow


def rewound_play(before: Play, location: str) -> Play:
    """The run after a rewind, as a worker loads it."""
    rows = tuple(before.rows)
    plan = plan_rewind(Snapshot(snapshot().record, len(rows), rows, ()), location, now=before.now, turn_id="t")
    left = [each for each in rows if each.location not in plan.dropped]
    return before.replayed_by(raced, rows=[*left, *plan.entries], generation=4, now=before.now)


def other_than_slow(choices: list[str]) -> str:
    return next((each for each in choices if each != "slow"), "slow")


@pytest.mark.parametrize("location", ["first", "second"])
def test_ended_run_continues_from_a_location_before_its_cancelled_entries(location):
    play = Play(raced).run(lambda choices: next((each for each in choices if each not in ("slow", CLOCK)), "slow"))
    assert play.entries["sleep"].status is CANCELLED
    again = rewound_play(play, location).begin()
    assert again.alive
    assert again.running.keys() == {location}
    assert again.turn.wake_at == BEGUN_AT + 500, "the reopened sleep keeps its end"
    while again.alive:
        again.complete(now=again.now + 1)
    assert again.value == "slow"
    assert again.entries["sleep"].status is CANCELLED


@pytest.mark.parametrize("location", ["first", "second", "~cancel"])
def test_cancelled_run_continues_from_any_location(location):
    play = Play(raced).begin()
    play.complete("first", now=play.now + 1)
    play.advance(now=play.now + 1)
    play.cancel()
    assert play.was_cancelled
    again = rewound_play(play, location).begin()
    assert "slow" in again.running
    while again.alive:
        again.complete(other_than_slow([*again.running]), now=again.now + 1)
    assert again.value == "slow"


# --- random histories


@st.composite
def histories(draw) -> list[Entry]:
    """Rows of distinct locations in call order, some written more than once, in random order of writing."""
    rows: list[Entry] = []
    kinds = ["step", "sleep", "receive", "deferred", "start_child", "loop", "timer", "stop", "~rollback"]
    number = 1
    for call in range(1, draw(st.integers(2, 12))):
        kind, status = draw(st.sampled_from(kinds)), draw(st.sampled_from(list(EntryStatus)))
        location = f"{kind}#{call}"
        fields: dict[str, Any] = {}
        loops = [entry.location for entry in rows if entry.kind == "loop"]
        if loops and draw(st.booleans()):
            location = f"{draw(st.sampled_from(loops))}/~{draw(st.integers(0, 2))}/{location}"
        if kind == "~rollback":
            steps = [entry.location for entry in rows if entry.kind == "step" and "/" not in entry.location]
            location, kind = f"{location}/undo", "step"
            fields["detail"] = detail({"of": draw(st.sampled_from([*steps, None]))})
        elif kind in ("receive", "deferred"):
            count = draw(st.integers(0, 3))
            messages = [
                message(n, draw(st.sampled_from(["event", "assignment"]))) for n in range(number, number + count)
            ]
            fields["detail"] = detail(draw(st.permutations(messages)))
            number += count
        elif kind == "start_child":
            fields["detail"] = detail({"id": f"c{call}", "attached": draw(st.booleans())})
        if status is CANCELLED:
            fields["settled_at"] = float(draw(st.integers(call, 14)))
        entry = row(location, call, status, kind=kind, **fields)
        if status is not PENDING and draw(st.booleans()):
            rows.append(row(location, call, PENDING, kind=kind, due_at=None if kind == "loop" else 50.0))
        rows.append(entry)
    return rows


def rewound(before: Snapshot, plan: RewindRun) -> Snapshot:
    """The snapshot after a store has applied the plan."""
    dropped = set(plan.dropped)
    rows = (*(each for each in before.entries if each.location not in dropped), *plan.entries)
    inbox = sorted([*before.inbox, *plan.returned], key=lambda message: message.number)
    record = replace(before.record, generation=before.record.generation + 1)
    return Snapshot(record, before.position + max(1, len(plan.entries)), rows, tuple(inbox))


@given(histories(), st.data())
def test_any_history_is_cut_at_the_location(rows, data):
    before = snapshot(*rows)
    target = data.draw(st.sampled_from(rows))
    plan = plan_rewind(before, target.location, now=NOW, turn_id="t")
    assert plan == plan_rewind(before, target.location, now=NOW, turn_id="t"), "the same again for the same"
    plan = unmarked(plan)

    latest = {each.location: each for each in rows}
    assert set(plan.dropped) == {each.location for each in latest.values() if each.call_seq >= target.call_seq}
    after = rewound(before, plan)
    kept = [each for each in before.entries if each.call_seq < target.call_seq]
    assert list(after.entries[: len(kept)]) == kept, "kept rows keep their order and what they say"

    stops = [entry for entry in plan.entries if entry.kind == "stop" and entry.location.startswith("~stop/4/")]
    rewritten = [entry for entry in plan.entries if entry not in stops]
    assert all(entry.call_seq < target.call_seq and entry.status is PENDING for entry in rewritten)
    assert len({entry.location for entry in plan.entries}) == len(plan.entries)
    for entry in rewritten:
        same = ("location", "kind", "name", "call_seq", "ordinal", "started_at")
        assert {name: asdict(entry)[name] for name in same} == {n: asdict(latest[entry.location])[n] for n in same}

    numbers = [message.number for message in plan.returned]
    assert numbers == sorted(set(numbers))
    assert all(message.kind == "event" and message.offset == 0 for message in plan.returned)
    assert len({each.call_seq for each in after.entries}) == len({each.location for each in after.entries})


@given(histories(), st.data())
def test_two_rewinds_leave_the_same_history_as_one(rows, data):
    targets = sorted(data.draw(st.sets(st.sampled_from(rows), min_size=1, max_size=2)), key=lambda each: each.call_seq)
    first, last = targets[0], targets[-1]
    before = snapshot(*rows)
    once = rewound(before, plan_rewind(before, first.location, now=NOW, turn_id="t"))
    halfway = rewound(before, plan_rewind(before, last.location, now=NOW, turn_id="t"))
    if first.call_seq < last.call_seq:
        twice = rewound(halfway, plan_rewind(halfway, first.location, now=NOW, turn_id="u"))
        assert _comparable(twice) == _comparable(once)
        assert [m.number for m in twice.inbox] == [m.number for m in once.inbox]


@given(histories(), st.data())
def test_rewind_to_an_iteration_is_idempotent(rows, data):
    loop = row("pages", 20, kind="loop")
    rows = [*rows, loop, aside("pages/~1", 21, "iteration"), row("pages/~1/get", 22), row("after", 23)]
    before = snapshot(*rows)
    after = rewound(before, plan_rewind(before, "pages/~1", now=NOW, turn_id="t"))
    again = plan_rewind(after, "pages/~1", now=NOW, turn_id="u")
    assert not set(again.dropped) - {each.location for each in after.entries if each.kind == "stop"}
    assert again.returned == ()
    assert _comparable(rewound(after, again)) == _comparable(after)


def _comparable(run: Snapshot) -> dict[str, Entry]:
    """The latest rows, without generations and locations of stops, which depend on the number of rewinds."""
    latest = {each.location: replace(each, generation=0) for each in run.entries if each.kind != "rewind"}
    stops = {
        f"stop {each.name}": replace(each, location="", call_seq=0) for each in latest.values() if each.kind == "stop"
    }
    return {location: each for location, each in latest.items() if each.kind != "stop"} | stops
