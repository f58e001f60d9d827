"""What a rewind or a fork leaves of a history, rule by rule on literal rows, and over random ones."""

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


def row(location: str, asked: int, status: EntryStatus = SUCCEEDED, *, kind: str = "step", **fields) -> Entry:
    """A row asked for at second `asked`; a succeeded one is the asked-th completion as well, a second later."""
    if status in (SUCCEEDED, FAILED):
        fields = {"seq": asked, "settled_at": asked + 1.0, **fields}
    if status is SUCCEEDED:
        fields = {"value": b"1", **fields}
    fields = {"ordinal": asked, "started_at": float(asked), **fields}
    return Entry(location, kind, location.rpartition("/")[2], status, asked, **fields)


def aside(location: str, asked: int, kind: str, **fields) -> Entry:
    """A row that is no part of its scope's order."""
    return row(location, asked, kind=kind, ordinal=-1, **fields)


def given_up(location: str, asked: int, at: float, **fields) -> Entry:
    return row(location, asked, CANCELLED, settled_at=at, **fields)


def detail(value: object) -> bytes:
    return msgspec.json.encode(value)


def mail(number: int, kind: str = "event", **fields) -> Message:
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
    """What is to be written, but for the mark that it was: see `test_the_clock_goes_on_from_the_rewind`."""
    return unmarked(plan_rewind(snapshot(*rows, **fields), location, now=NOW, turn_id="t"))


def fork(location: str, *rows: Entry, **fields) -> CreateRun:
    return unmarked(plan_fork(snapshot(*rows, **fields), location, run_id="f", created_by="me", shard=9, now=NOW))


def unmarked(plan: Any) -> Any:
    *entries, mark = plan.entries
    assert mark.kind == "rewind"
    return replace(plan, entries=tuple(entries))


@pytest.mark.parametrize(("location", "after"), [("first", "0"), ("second", "4"), ("third", "9")])
def test_the_clock_goes_on_from_the_rewind(location, after):
    rows = [row("first", 1, seq=4), row("second", 2, seq=9), row("third", 3)]
    mark = plan_rewind(snapshot(*rows), location, now=NOW, turn_id="t").entries[-1]
    assert (mark.location, mark.kind, mark.name, mark.settled_at) == ("~rewind/4", "rewind", after, NOW)
    forked = plan_fork(snapshot(*rows), location, run_id="f", created_by="me", shard=9, now=NOW)
    assert forked.entries[-1] == mark


# --- what goes and what stays


def test_everything_asked_for_at_or_after_the_location_goes():
    plan = rewind("b", row("a", 1), row("b", 2), row("c", 3))
    assert plan == RewindRun(run_id="r", base=40, turn_id="t", now=NOW, dropped=("b", "c"))


def test_by_order_of_asking_and_never_by_name_or_position():
    rows = [row("x/late", 5), row("z", 1), row("x/early", 2), row("x", 4), row("a", 3, PENDING)]
    assert rewind("a", *rows).dropped == ("a", "x", "x/late")


def test_the_latest_row_of_a_location_counts():
    rows = [row("a", 1, PENDING), row("b", 2, PENDING), row("a", 1), row("b", 2)]
    assert rewind("b", *rows).dropped == ("b",)


def test_an_entry_asked_for_before_and_done_after_stays_done():
    plan = rewind("b", row("a", 1, settled_at=99.0, seq=8), row("b", 2))
    assert (plan.dropped, plan.entries) == (("b",), ())


def test_what_nobody_asked_for_goes_by_its_place_in_the_order_too():
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


def test_a_cancel_can_itself_be_gone_back_to():
    plan = rewind("~cancel", row("a", 1), aside("~cancel", 2, "cancel"), row("~children", 3, kind="stop_children"))
    assert plan.dropped == ("~cancel", "~children")


def test_what_closed_the_run_goes():
    rows = [row("a", 1), row("b", 2, FAILED), row("~children", 3), row("~rollback/r", 4), row("~exit/e", 5)]
    assert rewind("b", *rows).dropped == ("b", "~children", "~rollback/r", "~exit/e")


# --- where one cannot go back to


def test_an_unknown_location_is_refused_with_near_ones():
    with pytest.raises(InvalidArgument, match=r"run 'r' has no entry at 'charg'; there are 'charge'") as refused:
        rewind("charg", row("charge", 1), row("sleep", 2))
    assert "sleep" not in str(refused.value)


def test_an_unknown_location_is_refused_with_the_last_ones_if_none_is_near():
    with pytest.raises(InvalidArgument, match=r"there are 'a2', 'a3', 'a4', 'a5', 'a6'$"):
        rewind("somewhere else", *(row(f"a{n}", n) for n in range(7)))


def test_a_run_without_a_history_has_no_location():
    with pytest.raises(InvalidArgument, match="its history is empty"):
        rewind("a")


def test_a_fork_refuses_the_same():
    with pytest.raises(InvalidArgument, match="no entry at 'b'"):
        fork("b", row("a", 1))


# --- loops


def loop_rows(*, status: EntryStatus = SUCCEEDED) -> list[Entry]:
    """A loop with three iterations of one step each, of which the last two had their state recorded; then a step."""
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


def test_a_loop_that_had_ended_goes_on_from_the_iteration_gone_back_to():
    plan = rewind("pages/~1/get", *loop_rows())
    assert plan.dropped == ("pages/~1/get", "pages/~2", "pages/~2/get", "after")
    [loop] = plan.entries
    assert loop == row("pages", 1, PENDING, kind="loop", ordinal=0, detail=b"{}")


def test_a_loop_that_had_failed_or_was_given_up_goes_on_too():
    error = ErrorRecord("ValueError", "no")
    failed = row("pages", 1, FAILED, kind="loop", error=error)
    for end in (failed, given_up("pages", 1, 9.0, kind="loop")):
        [loop] = rewind("pages/~0/get", end, row("pages/~0/get", 2)).entries
        assert loop == row("pages", 1, PENDING, kind="loop")


def test_an_open_loop_is_not_written_again():
    assert rewind("pages/~1/get", *loop_rows(status=PENDING)).entries == ()


def test_a_loop_of_which_nothing_goes_stays_ended():
    plan = rewind("after", *loop_rows())
    assert (plan.dropped, plan.entries) == (("after",), ())


def test_a_loop_with_a_like_name_is_another_loop():
    rows = [row("pages", 1, kind="loop"), row("pages#1", 2, kind="loop"), row("pages#1/~0/get", 3)]
    assert [entry.location for entry in rewind("pages#1/~0/get", *rows).entries] == ["pages#1"]


def test_a_loop_in_another_branch_is_opened_if_the_cut_goes_through_it():
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


def test_the_start_of_an_iteration_keeps_its_state():
    plan = rewind("pages/~1", *loop_rows())
    assert plan.dropped == ("pages/~1/get", "pages/~2", "pages/~2/get", "after")
    assert [entry.location for entry in plan.entries] == ["pages"]


def test_a_loop_itself_goes_with_all_that_is_in_it():
    plan = rewind("pages", *loop_rows())
    assert (len(plan.dropped), plan.entries) == (7, ())


def pruned_rows(*states: int) -> list[Entry]:
    """A loop that was pruned: an entry of iteration 3 outlasted it, then come iterations whose states are on record."""
    rows = [row("pages", 1, PENDING, kind="loop"), row("pages/~3/tell", 10, PENDING, kind="send")]
    for state in states:
        rows += [aside(f"pages/~{state}", 10 * state, "iteration"), row(f"pages/~{state}/get", 10 * state + 1)]
    return rows


@pytest.mark.parametrize("states", [(50,), (50, 51, 52), (40, 60)])
@pytest.mark.parametrize("location", ["pages/~3/get", "pages/~3", "pages/~3/tell", "pages/~39/get"])
def test_an_iteration_that_was_pruned_is_refused(location, states):
    oldest = rf"'pages' has been pruned; use iteration {states[0]} or later, or 'pages', the loop's beginning"
    with pytest.raises(InvalidArgument, match=oldest):
        rewind(location, *pruned_rows(*states))


def test_an_iteration_after_the_pruned_ones_is_fine():
    assert rewind("pages/~51/get", *pruned_rows(50, 51)).dropped == ("pages/~51/get",)


def test_a_pruned_iteration_around_another_loop_is_refused():
    rows = [*pruned_rows(50, 51), row("pages/~3/inner", 5, kind="loop"), row("pages/~3/inner/~0/x", 6)]
    with pytest.raises(InvalidArgument, match="iteration 3 of the loop 'pages'"):
        rewind("pages/~3/inner/~0/x", *rows)


def test_iterations_before_the_first_recorded_state_are_fine_if_nothing_was_pruned():
    rows = [row("l", 1, kind="loop"), *(row(f"l/~{n}/x", 2 + n) for n in range(10))]
    assert rewind("l/~4/x", *rows).dropped == tuple(f"l/~{n}/x" for n in range(4, 10))
    one_state = [*rows, aside("l/~10", 20, "iteration")]
    assert rewind("l/~4/x", *one_state).dropped[0] == "l/~4/x"
    two_states = [*one_state[:1], *one_state[4:], aside("l/~20", 21, "iteration")]  # the first had nothing to record
    assert rewind("l/~4/x", *two_states).dropped[0] == "l/~4/x"


def test_a_pin_that_was_set_on_a_replay_leaves_what_was_asked_for_before_it():
    plan = rewind("~version/gate", row("a", 1), aside("~version/gate", 1, "version"), row("b", 2))
    assert plan.dropped == ("~version/gate", "b")


def test_a_loop_beside_the_location_goes_on_from_its_last_state_that_stays():
    rows = [row("l", 1, kind="loop"), aside("l/~4", 2, "iteration"), row("x", 3), aside("l/~5", 4, "iteration")]
    assert rewind("x", *rows).dropped == ("x", "l/~5")
    with pytest.raises(InvalidArgument, match="the loop 'l' had done by then have been pruned"):
        rewind("x", *rows[:1], *rows[2:], row("l/~5/y", 5))


def test_a_branch_that_looks_like_an_iteration_is_none():
    with pytest.raises(InvalidArgument, match="no entry at"):
        rewind("join/~3/x", row("join", 1, kind="race"), aside("join/~50", 2, "iteration"))


# --- what the workflow gave up


def test_what_was_given_up_after_the_location_stands_again_as_it_stood():
    rows = [
        row("sleep", 1, PENDING, kind="sleep", due_at=77.0),
        row("b", 2),
        given_up("sleep", 1, 5.0, kind="sleep"),
    ]
    plan = rewind("b", *rows)
    assert plan.entries == (row("sleep", 1, PENDING, kind="sleep", due_at=77.0, generation=4),)


def test_a_step_that_was_given_up_before_it_was_ever_written_is_pending():
    plan = rewind("b", given_up("a", 1, 5.0, fingerprint=b"f"), row("b", 2))
    assert plan.entries == (row("a", 1, PENDING, fingerprint=b"f", generation=4),)


def test_attempts_and_the_next_ones_time_come_back():
    waiting = row("a", 1, PENDING, attempts=2, due_at=50.0, error=ErrorRecord("OSError", "away"))
    plan = rewind("b", row("a", 1, PENDING), waiting, row("b", 2), given_up("a", 1, 5.0, attempts=2))
    assert plan.entries == (replace(waiting, generation=4),)


def test_what_has_become_known_of_it_meanwhile_stays_known():
    rows = [row("run", 1, PENDING, kind="child"), row("b", 2), given_up("run", 1, 5.0, kind="child", detail=b"{}")]
    assert rewind("b", *rows).entries == (row("run", 1, PENDING, kind="child", detail=b"{}", generation=4),)
    rows = [row("run", 1, PENDING, kind="child", detail=b"{}"), row("b", 2), given_up("run", 1, 5.0, kind="child")]
    assert rewind("b", *rows).entries == (row("run", 1, PENDING, kind="child", detail=b"{}", generation=4),)


def test_what_was_given_up_before_stays_given_up():
    rows = [row("a", 1, PENDING), given_up("a", 1, 1.5), row("b", 2)]
    assert rewind("b", *rows).entries == ()


def test_what_was_given_up_in_the_same_moment_is_opened():
    assert len(rewind("b", given_up("a", 1, 2.0), row("b", 2)).entries) == 1


def test_a_loop_that_its_body_left_with_an_error_since_stands_again():
    rows = [
        row("pages", 1, PENDING, kind="loop"),
        row("b", 2),
        row("pages", 1, FAILED, kind="loop", seq=None, settled_at=5.0, error=ErrorRecord("ValueError", "no")),
    ]
    assert rewind("b", *rows).entries == (row("pages", 1, PENDING, kind="loop", generation=4),)


@pytest.mark.parametrize("kind", ["sleep", "send", "outcome", "child", "publish"])
def test_what_was_asked_for_and_given_up_in_one_turn_is_opened_from_its_only_row(kind):
    plan = rewind("b", given_up("a", 1, 5.0, kind=kind), row("b", 2))
    assert plan.entries == (row("a", 1, PENDING, kind=kind, generation=4),)


def test_a_note_of_a_compensation_is_nothing_that_could_be_open():
    assert rewind("b", given_up("~compensation/a", 1, 5.0, kind="compensation"), row("b", 2)).entries == ()


def test_a_cancelled_run_is_open_again_before_its_cancel():
    rows = [
        row("receive", 1, PENDING, kind="receive"),
        aside("~cancel", 3, "cancel"),
        given_up("receive", 1, 3.0, kind="receive"),
    ]
    reopened = row("receive", 1, PENDING, kind="receive")
    assert rewind("~cancel", *rows).entries == (reopened,), "under its old generation: it has to subscribe anew"


# --- compensation


def undoing(location: str, asked: int, of: str | None, status: EntryStatus = SUCCEEDED) -> Entry:
    return row(location, asked, status, detail=detail({"of": of}))


@pytest.mark.parametrize("place", ["~rollback/refund", "~rollback#2/refund", "a/~rollback/refund#1"])
def test_a_step_that_was_rolled_back_is_done_again_in_its_place(place):
    charge = row("charge", 1, attempts=2, fingerprint=b"f", settled_at=1.5, seq=5)
    plan = rewind("b", charge, row("b", 2, FAILED), undoing(place, 3, "charge"))
    assert plan.dropped == ("b", place)
    assert plan.entries == (row("charge", 1, PENDING, seq=5, fingerprint=b"f", generation=4),)


@pytest.mark.parametrize("status", [PENDING, FAILED, CANCELLED])
def test_a_step_whose_rollback_did_not_succeed_was_not_undone_and_is_not_repeated(status):
    plan = rewind("b", row("charge", 1, seq=5), row("b", 2, FAILED), undoing("~rollback/refund", 3, "charge", status))
    assert plan.entries == ()


def test_a_step_of_which_the_rollback_stays_is_left_alone():
    plan = rewind("b", row("charge", 1), undoing("~rollback/refund", 2, "charge"), row("b", 3))
    assert plan.entries == ()


@pytest.mark.parametrize(
    "left",
    [row("charge", 1, FAILED), row("charge", 1, PENDING, seq=1), row("other", 1)],
    ids=["failed", "redo", "gone"],
)
def test_only_a_step_that_succeeded_is_done_again(left):
    assert rewind("b", left, row("b", 2), undoing("~rollback/refund", 3, "charge")).entries == ()


def test_a_step_that_goes_itself_is_not_written():
    plan = rewind("charge", row("a", 1), row("charge", 2), undoing("~rollback/refund", 3, "charge"))
    assert (plan.dropped, plan.entries) == (("charge", "~rollback/refund"), ())


def test_a_rollback_that_undoes_no_step_redoes_none():
    rows = [row("a", 1), row("b", 2), undoing("~rollback/tidy", 3, None), row("~rollback/bare", 4)]
    assert rewind("b", *rows).entries == ()


def test_the_detail_of_other_entries_is_not_taken_for_a_rollback():
    rows = [row("a", 1), row("b", 2), undoing("rollback/x", 3, "a"), undoing("~rollback", 4, "a")]
    assert rewind("b", *rows).entries == ()


def test_a_step_in_the_iteration_that_goes_on_is_done_again():
    rows = [*loop_rows(status=PENDING)[:6], row("pages/~2/put", 7), undoing("~rollback/x", 9, "pages/~2/get")]
    plan = rewind("pages/~2/put", *rows)
    assert [(entry.location, entry.status, entry.seq) for entry in plan.entries] == [("pages/~2/get", PENDING, 6)]


def test_a_step_in_a_loop_that_was_given_up_before_is_done_again():
    rows = [given_up("pages", 1, 4.0, kind="loop"), row("pages/~0/get", 2), row("b", 5)]
    plan = rewind("b", *rows, undoing("~rollback/x", 9, "pages/~0/get"))
    assert [(entry.location, entry.status, entry.seq) for entry in plan.entries] == [("pages/~0/get", PENDING, 2)]


@pytest.mark.parametrize(
    ("rows", "location"),
    [
        (loop_rows(status=PENDING), "pages/~2/get"),  # the replay begins with iteration 2
        (loop_rows(), "after"),  # the loop is over
        ([*loop_rows()[:1], *loop_rows()[4:]], "after"),  # pruned
    ],
)
def test_a_step_that_a_replay_does_not_come_by_cannot_be_done_again(rows, location):
    with pytest.raises(
        InvalidArgument, match=r"step 'pages/~1/get' before it was rolled back and cannot be executed again"
    ):
        rewind(location, *rows, undoing("~rollback/x", 9, "pages/~1/get"))


def note(key: str, asked: int, status: EntryStatus = SUCCEEDED) -> Entry:
    return Entry(f"~compensation/{key}", "compensation", "refund", status, asked, detail=b"{}")


def test_a_noted_compensation_that_was_taken_up_since_is_due_again():
    struck = replace(note("pages/~0/~on_rollback", 1, CANCELLED), detail=b'{"taken_by": ""}')
    rows = [note("pages/~0/~on_rollback", 1), row("b", 2, FAILED), struck]
    assert rewind("b", *rows).entries == (note("pages/~0/~on_rollback", 1),)


def test_a_noted_compensation_that_was_taken_up_before_is_not():
    rows = [note("pages/~0/~on_rollback", 1), note("pages/~0/~on_rollback", 1, CANCELLED), row("b", 2)]
    assert rewind("b", *rows).entries == ()


def test_notes_from_before_the_run_continued_stay_whatever_goes():
    rows = [note("~before/1", 1), note("~before/2", 2), row("a", 1), note("x", 2), note("~before/2", 2, CANCELLED)]
    plan = rewind("a", *rows)
    assert (plan.dropped, plan.entries) == (("a", "~compensation/x"), (note("~before/2", 2),))


# --- messages


def taken(
    location: str, asked: int, *messages: Message, kind: str = "receive", status: EntryStatus = SUCCEEDED
) -> Entry:
    return row(location, asked, status, kind=kind, detail=detail(list(messages)))


def test_events_that_were_received_since_are_unread_again_in_their_order():
    plan = rewind(
        "b",
        taken("receive", 1, mail(1)),
        row("b", 2),
        taken("receive#1", 3, mail(9), mail(4), kind="receive_batch"),
        taken("receive#2", 4, mail(2, wants_reply=True), kind="receive_request"),
        taken("receive#3", 5, mail(3), status=FAILED),
    )
    assert plan.returned == (mail(2, wants_reply=True), mail(3), mail(4), mail(9))


def test_an_event_of_a_topic_comes_back_as_mail_of_the_run():
    assigned = mail(5, "assignment", target="3:receive", offset=12, expires_at=2000.0, sender="s")
    plan = rewind("receive", taken("receive", 1, assigned))
    assert plan.returned == (mail(5, expires_at=2000.0, sender="s"),)


def test_a_settled_deferred_stays_settled():
    done = mail(5, "deferred")
    assert rewind("d", taken("d", 1, done, kind="deferred")).returned == (done,)


def test_other_mail_and_other_details_are_not_returned():
    rows = [
        taken("receive", 1, mail(1, "cancel"), mail(2, "child")),
        row("receive#1", 2, PENDING, kind="receive", detail=b'{"names": []}'),
        row("receive#2", 3, CANCELLED, kind="receive", detail=b'{"names": []}'),
        row("receive#3", 4, FAILED, kind="receive"),
        taken("step", 5, mail(3), kind="step"),
    ]
    assert rewind("receive", *rows).returned == ()


# --- children


def child(
    location: str, asked: int, id: str, status: EntryStatus = SUCCEEDED, *, attached: bool = True, **fields
) -> Entry:
    fields = {"kind": "start_child", **fields}
    return row(location, asked, status, detail=detail({"id": id, "attached": attached}), **fields)


def test_attached_children_that_were_started_since_are_to_be_stopped():
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


def test_a_stop_that_was_not_carried_out_yet_is_asked_for_anew():
    rows = [row("a", 1), row("b", 2), aside("~stop/3/0", 30, "stop")]
    open_stop = Entry("~stop/3/1", "stop", "c1", PENDING, 31, generation=3)
    plan = rewind("b", *rows, open_stop)
    assert plan.dropped == ("b", "~stop/3/0", "~stop/3/1")
    assert [(entry.location, entry.name, entry.call_seq) for entry in plan.entries] == [("~stop/4/0", "c1", 32)]


# --- forks


def test_a_fork_has_the_kept_rows_and_the_rewritten_ones():
    rows = loop_rows()
    made = fork("pages/~1/get", *rows)
    assert made.entries == (*rows[:3], rows[6], row("pages", 1, PENDING, kind="loop", ordinal=0, detail=b"{}"))


def test_a_forks_record_begins_anew_but_replays_as_the_old_one():
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


def test_a_fork_gets_the_mail_of_the_part_left_out_and_what_is_unread():
    unread = (mail(3), mail(5, "assignment"), mail(6, "cancel"), mail(7, "deferred"), mail(8, "child"))
    made = fork("receive", taken("receive", 1, mail(4), mail(2, "assignment", offset=3)), inbox=unread)
    expected = [(1, "m2", "event"), (2, "m3", "event"), (3, "m4", "event"), (4, "m7", "deferred")]
    assert [(each.number, each.id, each.kind) for each in made.inbox] == expected
    assert made.inbox[0].offset == 0


def test_a_fork_stops_nobodys_children():
    stop = Entry("~stop/3/0", "stop", "c1", PENDING, 1)
    made = fork("b", stop, row("a", 2), row("b", 3), child("c", 4, "c2"))
    assert [entry.location for entry in made.entries] == ["a"]


def test_a_fork_redoes_what_was_rolled_back():
    made = fork("b", row("charge", 1), row("b", 2), undoing("~rollback/refund", 3, "charge"))
    assert made.entries == (row("charge", 1), row("charge", 1, PENDING, seq=1, generation=4))


# --- what is left replays: the plan held against the runner


async def raced(ctx: Context) -> str:
    slow = asyncio.create_task(ctx.step("slow", lambda: "slow"))
    nap = asyncio.create_task(ctx.sleep(500))
    await asyncio.sleep(0)  # both have asked now
    await ctx.step("first", lambda: 1)
    await ctx.step("second", lambda: 2)
    nap.cancel()
    return await slow


def gone_back(before: Play, location: str) -> Play:
    """The run after a rewind, as a worker finds it."""
    rows = tuple(before.rows)
    plan = plan_rewind(Snapshot(snapshot().record, len(rows), rows, ()), location, now=before.now, turn_id="t")
    left = [each for each in rows if each.location not in plan.dropped]
    return before.replayed_by(raced, rows=[*left, *plan.entries], generation=4, now=before.now)


def plain_steps_first(choices: list[str]) -> str:
    return next((each for each in choices if each != "slow"), "slow")


@pytest.mark.parametrize("location", ["first", "second"])
def test_a_run_that_has_ended_goes_on_from_a_place_before_what_it_gave_up(location):
    play = Play(raced).run(lambda choices: next((each for each in choices if each not in ("slow", CLOCK)), "slow"))
    assert play.entries["sleep"].status is CANCELLED
    again = gone_back(play, location).begin()
    assert again.alive
    assert again.running.keys() == {location}
    assert again.turn.wake_at == BEGUN_AT + 500, "the sleep that was given up ends when it would have"
    while again.alive:
        again.complete(now=again.now + 1)
    assert again.value == "slow"
    assert again.entries["sleep"].status is CANCELLED


@pytest.mark.parametrize("location", ["first", "second", "~cancel"])
def test_a_run_that_was_cancelled_goes_on_from_any_place(location):
    play = Play(raced).begin()
    play.complete("first", now=play.now + 1)
    play.advance(now=play.now + 1)
    play.cancel()
    assert play.was_cancelled
    again = gone_back(play, location).begin()
    assert "slow" in again.running
    while again.alive:
        again.complete(plain_steps_first([*again.running]), now=again.now + 1)
    assert again.value == "slow"


# --- over random histories


@st.composite
def histories(draw) -> list[Entry]:
    """Rows of distinct locations in order of asking, some written more than once, in a random order of writing."""
    rows: list[Entry] = []
    kinds = ["step", "sleep", "receive", "deferred", "start_child", "loop", "timer", "stop", "~rollback"]
    number = 1
    for asked in range(1, draw(st.integers(2, 12))):
        kind, status = draw(st.sampled_from(kinds)), draw(st.sampled_from(list(EntryStatus)))
        location = f"{kind}#{asked}"
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
            messages = [mail(n, draw(st.sampled_from(["event", "assignment"]))) for n in range(number, number + count)]
            fields["detail"] = detail(draw(st.permutations(messages)))
            number += count
        elif kind == "start_child":
            fields["detail"] = detail({"id": f"c{asked}", "attached": draw(st.booleans())})
        if status is CANCELLED:
            fields["settled_at"] = float(draw(st.integers(asked, 14)))
        entry = row(location, asked, status, kind=kind, **fields)
        if status is not PENDING and draw(st.booleans()):
            rows.append(row(location, asked, PENDING, kind=kind, due_at=None if kind == "loop" else 50.0))
        rows.append(entry)
    return rows


def rewound(before: Snapshot, plan: RewindRun) -> Snapshot:
    """What a store makes of it."""
    gone = set(plan.dropped)
    rows = (*(each for each in before.entries if each.location not in gone), *plan.entries)
    inbox = sorted([*before.inbox, *plan.returned], key=lambda message: message.number)
    record = replace(before.record, generation=before.record.generation + 1)
    return Snapshot(record, before.position + max(1, len(plan.entries)), rows, tuple(inbox))


@given(histories(), st.data())
def test_any_history_is_cut_where_it_was_asked(rows, data):
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
def test_cutting_in_two_steps_leaves_what_cutting_at_once_leaves(rows, data):
    targets = sorted(data.draw(st.sets(st.sampled_from(rows), min_size=1, max_size=2)), key=lambda each: each.call_seq)
    first, last = targets[0], targets[-1]
    before = snapshot(*rows)
    once = rewound(before, plan_rewind(before, first.location, now=NOW, turn_id="t"))
    halfway = rewound(before, plan_rewind(before, last.location, now=NOW, turn_id="t"))
    if first.call_seq < last.call_seq:
        twice = rewound(halfway, plan_rewind(halfway, first.location, now=NOW, turn_id="u"))
        assert _standing(twice) == _standing(once)
        assert [m.number for m in twice.inbox] == [m.number for m in once.inbox]


@given(histories(), st.data())
def test_going_back_to_an_iteration_twice_is_going_back_once(rows, data):
    loop = row("pages", 20, kind="loop")
    rows = [*rows, loop, aside("pages/~1", 21, "iteration"), row("pages/~1/get", 22), row("after", 23)]
    before = snapshot(*rows)
    after = rewound(before, plan_rewind(before, "pages/~1", now=NOW, turn_id="t"))
    again = plan_rewind(after, "pages/~1", now=NOW, turn_id="u")
    assert not set(again.dropped) - {each.location for each in after.entries if each.kind == "stop"}
    assert again.returned == ()
    assert _standing(rewound(after, again)) == _standing(after)


def _standing(run: Snapshot) -> dict[str, Entry]:
    """The latest rows, without what differs by how often a run was cut: generations, and where stops are noted."""
    latest = {each.location: replace(each, generation=0) for each in run.entries if each.kind != "rewind"}
    stops = {
        f"stop {each.name}": replace(each, location="", call_seq=0) for each in latest.values() if each.kind == "stop"
    }
    return {place: each for place, each in latest.items() if each.kind != "stop"} | stops
