"""Checks after all runs have ended: every event, record, compensation and outcome is accounted for."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from perdure import Client, RunStatus
from perdure.codec import JSON
from perdure.execution.queue_expiry import MESSAGE_NAME as EXPIRED_MESSAGE
from perdure.model.records import Entry, EntryStatus, RunRecord
from perdure.testing.simulation.run_model import RunModel
from perdure.testing.simulation.simulation import Simulation
from tests.simulation.event_types import ALL, MAY_EXPIRE
from tests.simulation.external_state import ExternalState
from tests.simulation.random_clients import Responses, all_records
from tests.simulation.random_programs import IMPORTS, STEP_TIMEOUT, plain
from tests.simulation.random_schedules import check_slots
from tests.simulation.reference_model import LIMITED, depends_on_generation, expected_of_run
from tests.simulation.stream_followers import check_follower
from tests.simulation.workflows import AGAIN, MAX_SUSPEND

FASTEST_CLOCK = 1.5  # the highest rate of a clock that drifts
SLOWEST = 20.0  # seconds from the start of a step body to its timeout, by the slowest clock
A_LONG_TIME = 400 * 86_400.0  # seconds, longer than any retention


async def check_end(simulation: Simulation, state: ExternalState, responses: Responses, client: Client) -> None:
    """Check all guarantees after all runs have ended."""
    models, pruned_runs = simulation.checker.models, list(simulation.checker.pruned_runs)
    lives = [*pruned_runs, *((models[each.id], each) for each in await all_records(client))]
    timed_out = _timed_out_by_pauses(simulation, [run for run, _ in lives])
    family = Family(responses.forks, lives, {run.parent for run, _ in pruned_runs}, timed_out)
    _check_events(simulation, state, responses, family, await _locate_events(simulation, family, client))
    await _check_expired(simulation, family)
    _check_responses(simulation, responses, family)
    for run, record in family.lives:
        _check_outcome(simulation, run, record, family)
        _check_limits(simulation, run, record)
        _check_compensations(simulation, state, run)
        _check_code(simulation, run, record)
    for run in models.values():
        await _check_streams(simulation, run)
    await _check_followers(simulation, responses, family)
    await check_slots(simulation, client, family.lives)
    await _check_nothing_is_left(simulation)


@dataclass
class Family:
    """All runs in their last state, including pruned runs, and the original of each fork."""

    forks: dict[str, str]
    lives: list[tuple[RunModel, RunRecord]]
    lost_children: set[str | None]  # parents of pruned children
    timed_out: set[str]  # runs with a step, or a descendant with a step, that timed out because its worker was paused

    def touched(self, run: RunModel) -> bool:
        """Return whether a client or a timeout of a paused worker changed the run, its parent or its original."""
        if run.touched or run.id in self.timed_out or run.id in IMPORTS or (run.forked and run.id not in self.forks):
            return True
        if run is not next(each for each, _ in self.lives if each.id == run.id):
            return True  # its id was used before: it may find children of the earlier run
        origin = self.forks[run.id] if run.forked else run.parent
        if run.forked and origin in self.lost_children:
            return True  # it may have waited for a pruned child
        return origin is not None and any(self.touched(each) for each, _ in self.lives if each.id == origin)


def _timed_out_by_pauses(simulation: Simulation, runs: list[RunModel]) -> set[str]:
    """Return the runs whose outcome may be different because a worker was paused for longer than a step's timeout."""
    parents = {run.id: run.parent for run in runs}
    found = set()
    for run in runs:
        run_id: str | None = run.id
        if any(_timed_out_by_pause(simulation, run, entry) for entry in run.recorded):
            while run_id is not None and run_id not in found:
                found.add(run_id)
                run_id = parents.get(run_id)
    return found


def _timed_out_by_pause(simulation: Simulation, run: RunModel, step: Entry) -> bool:
    """Return whether a step timed out, and a pause of its worker outlasted the timeout."""
    if step.error is None or step.error.type != "TimeoutError" or step.kind != "step":
        return False
    limit = STEP_TIMEOUT / FASTEST_CLOCK
    attempts = [body for body in simulation.bodies if (body.run_id, body.location) == (run.id, step.location)]
    return any(
        start <= body.at + SLOWEST and body.at + limit <= end for body in attempts for start, end in body.freezes
    )


class EventLocations:
    """The final location of each event, by its number."""

    def __init__(self) -> None:
        self.inboxes: Counter[str] = Counter()
        self.topics: Counter[str] = Counter()
        self.dead_letters: Counter[str] = Counter()
        self.received: dict[str, list[str]] = {}
        self.put_back: set[str] = set()  # returned to the mailbox by a rewind, and not read before the end


async def _locate_events(simulation: Simulation, family: Family, client: Client) -> EventLocations:
    locations = EventLocations()
    for run, _ in family.lives:
        for number in _consumed_by(run):
            locations.received.setdefault(number, []).append(run.id)
    for run in simulation.checker.models.values():
        inbox = await simulation.store.inbox(run.id)
        locations.inboxes.update(_number(each.body) for each in inbox if each.kind == "event")
        locations.put_back.update(_number(message.body) for message in run.returned.values())
    for kind in ALL:
        topic = await simulation.store.topic(f"sim.{kind.__name__.lower()}")
        locations.topics.update(_number(each.body) for each in topic)
    for dead_letter in await simulation.store.dead_letters(1_000):
        if dead_letter.value is not None and dead_letter.kind == "event":
            locations.dead_letters[_number(dead_letter.value)] += 1
    return locations


def _consumed_by(run: RunModel) -> list[str]:
    """Return the numbers of the events that the turns of a run have consumed."""
    return [_number(message.body) for message in run.consumed.values()]


def _number(body: bytes | None) -> str:
    return str(json.loads(body or b"{}").get("n"))


def _check_events(
    simulation: Simulation, state: ExternalState, responses: Responses, family: Family, locations: EventLocations
) -> None:
    """Guarantee 4: each accepted event has exactly one location; rejected events have none."""
    accepted: dict[str, tuple[str, RunModel | None]] = {}
    runs = [run for run, _ in family.lives]
    for run in runs:
        for message in run.accepted.values():
            if message.name == EXPIRED_MESSAGE:
                continue  # `_check_expired`
            accepted[_number(message.body)] = (message.name, run)
    for event in simulation.checker.sent.values():
        accepted.setdefault(_number(event.body), (event.topic, None))
    for number, response in responses.sent.items():
        if response != "unsure" and (number in accepted) != (response == "ok"):
            simulation.checker.report(f"the sender of {number} received {response}, which is wrong")
    rewound = {run.id for run in runs if run.rewound}
    # The id of a sent event is derived from run id and location: with a reused run id it counts as a duplicate.
    rewound |= {run_id for run_id, lives in Counter(run.id for run in runs).items() if lives > 1}
    copied = {_number(message.body) for run in runs for message in run.copied.values() if message.kind == "event"}
    for number, (name, target) in accepted.items():
        readers = locations.received.get(number, [])
        if number in copied:
            continue  # the original run and its forks have copies
        if rewound.intersection((number.split("/")[0], *readers)) or (target is not None and target.rewound):
            continue  # the run sent and received its events again
        wrong = _unaccounted(number, name, target, locations)
        if wrong is not None:
            receiver = "all" if target is None else target.id
            simulation.checker.report(f"event {name} {number} for {receiver}: {wrong}")
    for run in runs:
        for message in run.consumed.values():
            if message.name not in MAY_EXPIRE and (run.id, _number(message.body)) not in state.received:
                simulation.checker.report(f"run {run.id} consumed {message.name} {message.id} without receiving it")
        twice = [number for number, count in Counter(_received_by(run)).items() if count > 1]
        if run.forked:  # a fork is a new run, which reads unconsumed topic events again
            twice = [number for number in twice if accepted[number][0] != "sim.notice"]
        twice = [number for number in twice if number not in copied]
        if twice and not run.rewound:
            simulation.checker.report(f"run {run.id} received {twice} more than once")


async def _check_expired(simulation: Simulation, family: Family) -> None:
    """A run that was not admitted in time leaves one dead letter."""
    expired = Counter(
        run.id
        for run, record in family.lives
        if record.status is RunStatus.CANCELLED and record.first_executed_at is None
        for message in run.accepted.values()
        if message.name == EXPIRED_MESSAGE
    )
    letters = await simulation.store.dead_letters(1_000, kind="expired_wait")
    if Counter(each.original_target for each in letters) != expired:
        simulation.checker.report(f"runs {dict(expired)} expired in their queues, but there are dead letters {letters}")


def _received_by(run: RunModel) -> list[str]:
    """Return the recorded events of a run. A loop may have dropped some before they were written."""
    values = [
        JSON.decode(entry.value)
        for entry in run.recorded
        if entry.kind.startswith("receive") and _succeeded(entry) and entry.value is not None
    ]
    return [each["n"] for value in values for each in (value if isinstance(value, list) else [value]) if "n" in each]


def _unaccounted(number: str, name: str, target: RunModel | None, locations: EventLocations) -> str | None:
    received = locations.received.get(number, [])
    if name == "sim.notice":
        return None if locations.topics[number] == 1 else "deleted, although other runs may read it"
    found = len(received) + locations.inboxes[number] + locations.topics[number] + locations.dead_letters[number]
    if found > 1:
        return f"in several locations: {received}, {locations.__dict__}"
    if found == 1:
        wrong_receiver = target is not None and received not in ([], [target.id]) and name != "sim.passed"
        return f"received by {received}" if wrong_receiver else None
    if name in (*MAY_EXPIRE, "sim.loud") or number in locations.put_back:
        return None
    if target is not None and name in ("sim.plain", "sim.request") and target.ending is not None:
        return None  # discarded, as its event type defines
    return "lost"


def _check_responses(simulation: Simulation, responses: Responses, family: Family) -> None:
    """Guarantees 1 and 6: the responses that clients received remain true."""
    lives = Counter(run.id for run, _ in family.lives)
    for run_id, count in Counter(responses.created).items():
        if count > lives[run_id]:
            simulation.checker.report(f"{count} clients received created=True for {run_id}")
    for life, status in responses.ends:
        for record in (record for run, record in family.lives if life.is_of(run) and record.status != status):
            simulation.checker.report(f"a client saw {life.id} {status}, but it is {record.status}")
    for life, location, value in responses.records:
        for run in (run for run, _ in family.lives if life.is_of(run) and location not in run.pruned):
            entry = run.entries.get(location)
            now = None if entry is None or entry.value is None else JSON.decode(entry.value)
            seen = value if value is None else JSON.decode(JSON.encode(value))  # clients read typed values
            if entry is None or now != seen:
                simulation.checker.report(f"a client saw {location} of {life.id} as {value!r}, but it is {now!r}")
    firsts = Counter((run_id, token) for run_id, token, first in responses.completed if first)
    for (run_id, token), count in firsts.items():
        if count > lives[run_id]:
            simulation.checker.report(f"{count} clients were the first to complete {token}")


def _check_outcome(simulation: Simulation, run: RunModel, record: RunRecord, family: Family) -> None:
    """Guarantee 9: despite all faults, a run has the outcome of the reference model."""
    if family.touched(run):
        return
    if record.parent is not None and record.status is RunStatus.CANCELLED:
        return  # the parent cancelled it
    flow = record.original_workflow or record.workflow
    parts = JSON.decode(record.original_input or record.input)["parts"]
    expected = expected_of_run(parts, flow, limits=False)
    if expected is None or (run.forked and any(depends_on_generation(part) for part in parts)):
        return
    if record.status is RunStatus.SUCCEEDED:
        outcome: Any = ("value", plain(JSON.decode(record.result or b"null")))
    else:
        outcome = ("error", record.error.type if record.error is not None else "RunCancelled")
    if flow == "sim.gated" and outcome[0] == "value":
        outcome = ("value", ["gate" if outcome[1][0] == _gate(run) else "another gate", *outcome[1][1:]])
    limited = flow in LIMITED and outcome == ("error", "TimeoutError")
    if outcome != expected and not limited:
        simulation.checker.report(f"run {run.id} ({flow}) has outcome {outcome}, expected {expected}")
    if outcome[0] == "error" and record.workflow == "sim.again" and record.run_attempt != AGAIN.max_attempts:
        simulation.checker.report(f"run {run.id} failed for good after {record.run_attempt} attempts")


def _gate(run: RunModel) -> int:
    """Return the version branch that the history of a gated run contains."""
    pin = run.entries.get("~version/gate")
    new = "sim.new" in run.entries
    return int(pin.name) if pin is not None and (pin.name == "2") == new else 0 if new or pin is not None else 1


def _check_code(simulation: Simulation, run: RunModel, record: RunRecord) -> None:
    """A run keeps its version until it continues as new, and the same code requests the same calls."""
    continued = record.epoch - run.first_epoch
    has_unknown_epoch = (run.forked or run.id in IMPORTS) and any(
        each.first_epoch for each in simulation.checker.models.values()
    )
    if record.workflow == "sim.grown" and (record.version == 2) != (continued > 0) and not has_unknown_epoch:
        simulation.checker.report(f"run {run.id} has version {record.version}, but was continued {continued} times")
    # A call requested at the target of a rewind or fork reads a different time.
    if record.drift and not run.rewound and not run.forked:
        simulation.checker.report(f"run {run.id}: a replay requested {record.drift} with other arguments")


def _check_limits(simulation: Simulation, run: RunModel, record: RunRecord) -> None:
    """A limit stops a run only after it is exceeded, by the clock of the worker that stops the run."""
    stop = run.entries.get("~cancel")
    if stop is None or stop.settled_at is None or run.rewound or run.forked:
        return
    before = [
        each for each in run.recorded[run.before_epoch :] if each.settled_at and (each.seq or 0) < (stop.seq or 0)
    ]
    moved = max((each.settled_at or 0.0 for each in before), default=0.0)
    if stop.name == "timeout" and (record.deadline_at is None or stop.settled_at < record.deadline_at):
        simulation.checker.report(f"run {run.id} timed out at {stop.settled_at}, before {record.deadline_at}")
    if stop.name == "max_suspend" and stop.settled_at < moved + MAX_SUSPEND:
        simulation.checker.report(
            f"run {run.id} exceeded max_suspend at {stop.settled_at}, but last progressed at {moved}"
        )


def _check_compensations(simulation: Simulation, state: ExternalState, run: RunModel) -> None:
    """A failed or cancelled run has compensated all its steps; a retried run those of its failed attempts.

    A terminated run has not.
    """
    if run.ending is None or run.terminated or run.rewound:
        return
    unsuccessful = run.ending[0] is not RunStatus.SUCCEEDED
    done = run.recorded if unsuccessful else run.recorded[: run.before_retry]
    compensable = Counter(entry.location for entry in done if entry.name == "sim.undone" and _succeeded(entry))
    for location, times in sorted(compensable.items()):
        if state.compensations[run.id, location] < times and location not in run.undone_before:
            simulation.checker.report(
                f"run {run.id} is {run.ending[0]}, but {location} was not compensated {times} times"
            )
    if unsuccessful and run.recorded and not state.exits[run.id]:
        simulation.checker.report(f"run {run.id} has ended, but its exit hooks have not run")


async def _check_nothing_is_left(simulation: Simulation) -> None:
    """After the retention all runs are pruned completely, and no queue has a place."""
    ids = list(simulation.checker.models)
    await simulation.store.prune(simulation.loop.current_time + A_LONG_TIME, 1_000)
    for run_id, snapshot in zip(ids, await simulation.store.load(ids), strict=True):
        left = [*await simulation.store.history(run_id), *await simulation.store.inbox(run_id)]
        if snapshot is not None or left:
            simulation.checker.report(f"run {run_id} exceeds its retention, but is still stored: {left}")
    for summary in await simulation.store.queues():
        if summary.waiting or summary.held:
            simulation.checker.report(f"all runs have ended, but places are left: {summary}")


async def _check_followers(simulation: Simulation, responses: Responses, family: Family) -> None:
    lives = Counter(run.id for run, _ in family.lives)
    for follower in responses.followers:
        run = simulation.checker.models.get(follower.run_id)
        if run is not None and not run.rewound and lives[run.id] == 1 and run.id not in simulation.damaged:
            await check_follower(simulation, follower, run)


async def _check_streams(simulation: Simulation, run: RunModel) -> None:
    """Every item that is recorded as written is in the stream exactly once."""
    if run.rewound:
        return
    items = await simulation.store.stream(run.id, "log", 0, 1_000)
    if len(items) != run.streamed:
        simulation.checker.report(
            f"run {run.id} wrote {run.streamed} items to its stream, but it contains {len(items)}"
        )


def _succeeded(entry: Entry) -> bool:
    return entry.status is EntryStatus.SUCCEEDED
