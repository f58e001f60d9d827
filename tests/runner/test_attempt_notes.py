"""Notes of a step's attempts (heartbeats, the start of the first one) in the runner: recorded, handed on, dropped."""

from typing import Any

import pytest

from perdure import Retry, StepFailed, step
from perdure.codec import JSON
from perdure.codec.attempt_notes import AttemptNotes, decode_notes, encode_notes
from perdure.codec.failures import error_to_record
from perdure.model.records import EntryStatus
from perdure.model.turns import RecordProgress, StepDone
from tests.runner.turn_driver import Play

NOTES = encode_notes(JSON, AttemptNotes({"page": 1}, 1_000.0))
LATER = encode_notes(JSON, AttemptNotes({"page": 2}, 1_001.0, since=999.0))


def play_of(**options: Any) -> Play:
    @step(retry=Retry(max_attempts=3, delay=lambda attempt: 10.0))
    async def charge() -> str:
        return "done"

    async def one(ctx):
        try:
            return await charge()
        except StepFailed as failed:
            return str(failed)

    return Play(one, **options).begin()


def failure(attempt: int = 1, **fields: Any) -> StepDone:
    given = {"error": error_to_record(ValueError("no"), JSON), "retryable": True}
    return StepDone("charge", attempt, **{**given, **fields})


def test_progress_is_recorded_and_given_to_the_attempt_after_a_crash():
    play = play_of()
    assert play.running["charge"].notes is None
    [entry] = play.advance(RecordProgress("charge", 1, NOTES)).entries
    assert (entry.status, entry.attempts, entry.value) == (EntryStatus.PENDING, 1, NOTES)
    cold = play.crash().begin()
    assert (cold.running["charge"].attempt, cold.running["charge"].notes) == (1, NOTES)
    assert cold.turn.entries == (), "a replay writes nothing"
    cold.complete("charge")
    assert (cold.value, cold.entries["charge"].value) == ("done", JSON.encode("done"))


def test_notes_of_a_failure_go_to_the_next_attempt_and_later_ones():
    play = play_of()
    [entry] = play.advance(failure(notes=LATER)).entries
    assert (entry.value, entry.attempts) == (LATER, 1)
    play = play.crash().begin()
    play.advance(now=play.turn.wake_at)
    running = play.running["charge"]
    assert (running.attempt, running.notes) == (2, LATER)
    assert running.last_error is not None
    assert running.last_error.message == "no"
    [entry] = play.advance(failure(2)).entries
    assert entry.value == LATER, "an attempt without notes keeps those before it"
    play.close()


@pytest.mark.parametrize(
    "late", [RecordProgress("charge", 1, LATER), RecordProgress("charge", 3, LATER), RecordProgress("other", 2, LATER)]
)
def test_progress_of_another_attempt_is_ignored(late):
    play = play_of()
    play.advance(failure())
    assert play.advance(late).entries == ()
    play.advance(now=play.turn.wake_at)
    assert play.advance(late).entries == ()
    play.close()


def test_an_error_decides_on_the_pause_before_the_next_attempt():
    play = play_of()
    error = error_to_record(ValueError("no"), JSON)
    [entry] = play.advance(failure(error=type(error)(error.type, error.message, retry_after=77.0))).entries
    assert entry.due_at == play.now + 77
    play.close()


@pytest.mark.parametrize(("seconds_left", "retried"), [(10.5, True), (10.0, False), (3.0, False)])
def test_no_attempt_is_planned_at_the_end_of_the_time_for_all(seconds_left, retried):
    play = play_of()
    play.advance(failure(retry_until=play.now + seconds_left))
    assert play.alive is retried
    if retried:
        play.close()
    else:
        assert play.value == "step charge failed after 1 attempt: ValueError: no"


def test_resume_of_a_held_step_keeps_its_heartbeat_and_starts_its_time_again():
    play = play_of(suspend_on_failure=True)
    turn = play.advance(failure(retryable=False, notes=LATER))
    assert turn.held is not None
    cold = play.replayed_by(play.definition)
    cold.begin()
    cold.resume()
    running = cold.running["charge"]
    assert (running.attempt, decode_notes(JSON, running.notes)) == (1, AttemptNotes({"page": 2}, 1_001.0))
    cold.close()


@pytest.mark.parametrize(
    "stored",
    [b"7", b'"text"', b"[]", b"{}", b'{"heartbeat":1}', b'{"heartbeat_at":-1,"since":true}', b'{"since":1e300}'],
)
def test_what_is_no_note_is_ignored(stored):
    assert decode_notes(JSON, stored) == AttemptNotes()
