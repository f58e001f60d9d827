"""What must hold when nothing is open any more: an account of every event, record, compensation and outcome."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from perdure import Client, RunStatus
from perdure.codec import JSON
from perdure.model.records import Entry, EntryStatus, RunRecord
from perdure.testing.simulation.run_model import RunModel
from perdure.testing.simulation.simulation import Simulation
from tests.simulation.event_types import ALL, MAY_EXPIRE
from tests.simulation.external_state import Stage
from tests.simulation.random_clients import Seen, all_records
from tests.simulation.random_programs import plain
from tests.simulation.reference_model import LIMITED, depends_on_generation, expected_of_run
from tests.simulation.workflows import AGAIN, MAX_SUSPEND

A_LONG_TIME = 400 * 86_400.0  # seconds, longer than anything is kept


async def check_end(world: Simulation, stage: Stage, seen: Seen, client: Client) -> None:
    """When nothing is open any more."""
    pictures, departed = world.witness.models, list(world.witness.departed)
    lives = [*departed, *((pictures[each.id], each) for each in await all_records(client))]
    family = Family(seen.forks, lives, {run.parent for run, _ in departed})
    _check_events(world, stage, seen, family, await _where_events_are(world, family, client))
    _check_seen(world, seen, family)
    for run, record in family.lives:
        _check_outcome(world, run, record, family)
        _check_limits(world, run, record)
        _check_compensations(world, stage, run)
        _check_code(world, run, record)
    for run in pictures.values():
        await _check_streams(world, run)
    await _check_nothing_is_left(world)


@dataclass
class Family:
    """All runs that there were, the pruned ones too, each as it was at its end; and what is a copy of what."""

    forks: dict[str, str]
    lives: list[tuple[RunModel, RunRecord]]
    lost_children: set[str | None]  # runs of which a child was pruned

    def touched(self, run: RunModel) -> bool:
        """Whether somebody has meddled with it or with those that it comes from."""
        if run.touched or (run.forked and run.id not in self.forks):
            return True
        if run is not next(each for each, _ in self.lives if each.id == run.id):
            return True  # its id was used before: it may find children of the run that had it
        origin = self.forks[run.id] if run.forked else run.parent
        if run.forked and origin in self.lost_children:
            return True  # it may have waited for one of them
        return origin is not None and any(self.touched(each) for each, _ in self.lives if each.id == origin)


class Places:
    """Where events are at the end, by their number."""

    def __init__(self) -> None:
        self.mail: Counter[str] = Counter()
        self.topics: Counter[str] = Counter()
        self.letters: Counter[str] = Counter()
        self.received: dict[str, list[str]] = {}
        self.put_back: set[str] = set()  # into the mailbox of a run that was rewound, and ended without it


async def _where_events_are(world: Simulation, family: Family, client: Client) -> Places:
    places = Places()
    for run, _ in family.lives:
        for number in _taken_by(run):
            places.received.setdefault(number, []).append(run.id)
    for run in world.witness.models.values():
        places.mail.update(_number(each.body) for each in await world.store.inbox(run.id) if each.kind == "event")
        places.put_back.update(_number(message.body) for message in run.returned.values())
    for kind in ALL:
        places.topics.update(_number(each.body) for each in await world.store.topic(f"sim.{kind.__name__.lower()}"))
    for letter in await world.store.dead_letters(1_000):
        if letter.value is not None and letter.kind == "event":
            places.letters[_number(letter.value)] += 1
    return places


def _taken_by(run: RunModel) -> list[str]:
    """The numbers of the events that its turns have consumed."""
    return [_number(message.body) for message in run.consumed.values()]


def _number(body: bytes | None) -> str:
    return str(json.loads(body or b"{}").get("n"))


def _check_events(world: Simulation, stage: Stage, seen: Seen, family: Family, places: Places) -> None:
    """Guarantee 4: each accepted event is in one place, and no rejected one is anywhere."""
    accepted: dict[str, tuple[str, RunModel | None]] = {}
    runs = [run for run, _ in family.lives]
    for run in runs:
        for message in run.accepted.values():
            accepted[_number(message.body)] = (message.name, run)
    for event in world.witness.sent.values():
        accepted.setdefault(_number(event.body), (event.topic, None))
    for number, told in seen.sent.items():
        if told != "unsure" and (number in accepted) != (told == "ok"):
            world.witness.breaks(f"the sender of {number} was told {told}, and that is not so")
    rewound = {run.id for run in runs if run.rewound}
    # What a run sends is known by its id and place: under an id that is used again it is taken for a repetition.
    rewound |= {run_id for run_id, lives in Counter(run.id for run in runs).items() if lives > 1}
    copied = {_number(message.body) for run in runs for message in run.copied.values() if message.kind == "event"}
    for number, (name, target) in accepted.items():
        readers = places.received.get(number, [])
        if number in copied:
            continue  # it is with a run and with its forks
        if rewound.intersection((number.split("/")[0], *readers)) or (target is not None and target.rewound):
            continue  # what it sent it has sent again, what it received it has received again
        wrong = _unaccounted(number, name, target, places)
        if wrong is not None:
            whom = "all" if target is None else target.id
            world.witness.breaks(f"event {name} {number} for {whom}: {wrong}")
    for run in runs:
        for message in run.consumed.values():
            if message.name not in MAY_EXPIRE and (run.id, _number(message.body)) not in stage.received:
                world.witness.breaks(f"run {run.id} took {message.name} {message.id}, and its workflow never had it")
        twice = [number for number, count in Counter(_received_by(run)).items() if count > 1]
        if run.forked:  # a new run, which sees anew what others may see too
            twice = [number for number in twice if accepted[number][0] != "sim.news"]
        twice = [number for number in twice if number not in copied]
        if twice and not run.rewound:
            world.witness.breaks(f"run {run.id} received {twice} more than once")


def _received_by(run: RunModel) -> list[str]:
    """What its receives have on record; a loop may have dropped some before they were ever written."""
    values = [
        JSON.decode(entry.value)
        for entry in run.recorded
        if entry.kind.startswith("receive") and _succeeded(entry) and entry.value is not None
    ]
    return [each["n"] for value in values for each in (value if isinstance(value, list) else [value]) if "n" in each]


def _unaccounted(number: str, name: str, target: RunModel | None, places: Places) -> str | None:
    received = places.received.get(number, [])
    if name == "sim.news":
        return None if places.topics[number] == 1 else "gone, and others may still want to see it"
    found = len(received) + places.mail[number] + places.topics[number] + places.letters[number]
    if found > 1:
        return f"in several places: {received}, {places.__dict__}"
    if found == 1:
        stranger = target is not None and received not in ([], [target.id]) and name != "sim.passed"
        return f"received by {received}" if stranger else None
    if name in (*MAY_EXPIRE, "sim.loud") or number in places.put_back:
        return None
    if target is not None and name in ("sim.plain", "sim.question") and target.ending is not None:
        return None  # discarded, as its type says
    return "lost"


def _check_seen(world: Simulation, seen: Seen, family: Family) -> None:
    """Guarantees 1 and 6: what a client was told is still so."""
    lives = Counter(run.id for run, _ in family.lives)
    for run_id, count in Counter(seen.created).items():
        if count > lives[run_id]:
            world.witness.breaks(f"{count} clients were told that they had created {run_id}")
    for life, status in seen.ends:
        for record in (record for run, record in family.lives if life.is_of(run) and record.status != status):
            world.witness.breaks(f"a client saw {life.id} {status}, and it is {record.status}")
    for life, location, value in seen.records:
        for run in (run for run, _ in family.lives if life.is_of(run) and location not in run.pruned):
            entry = run.entries.get(location)
            now = None if entry is None or entry.value is None else JSON.decode(entry.value)
            if entry is None or now != value:
                world.witness.breaks(f"a client saw {location} of {life.id} as {value!r}, and it is {now!r}")
    firsts = Counter((run_id, token) for run_id, token, first in seen.settled if first)
    for (run_id, token), count in firsts.items():
        if count > lives[run_id]:
            world.witness.breaks(f"{count} clients were the first to settle {token}")


def _check_outcome(world: Simulation, run: RunModel, record: RunRecord, family: Family) -> None:
    """Guarantee 9: whatever went wrong around it, a run comes to what the model says."""
    if family.touched(run):
        return
    if record.parent is not None and record.status is RunStatus.CANCELLED:
        return  # its parent's affair
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
        world.witness.breaks(f"run {run.id} ({flow}) came to {outcome}, and should have come to {expected}")
    if outcome[0] == "error" and record.workflow == "sim.again" and record.run_attempt != AGAIN.max_attempts:
        world.witness.breaks(f"run {run.id} failed for good after {record.run_attempt} attempts")


def _gate(run: RunModel) -> int:
    """Which of its two ways the history of a gated run has gone."""
    pin = run.entries.get("~version/gate")
    new = "sim.new" in run.entries
    return int(pin.name) if pin is not None and (pin.name == "2") == new else 0 if new or pin is not None else 1


def _check_code(world: Simulation, run: RunModel, record: RunRecord) -> None:
    """A run keeps its version until it is continued, and the same code asks for the same."""
    if record.workflow == "sim.grown" and (record.version == 2) != (record.epoch > 0):
        world.witness.breaks(f"run {run.id} is of version {record.version}, and was continued {record.epoch} times")
    # What was asked for in the moment of a rewind's target, or of a fork's, sees another time.
    if record.drift and not run.rewound and not run.forked:
        world.witness.breaks(f"run {run.id}: a replay asked for {record.drift} with other arguments")


def _check_limits(world: Simulation, run: RunModel, record: RunRecord) -> None:
    """A limit stops a run when it is exceeded, by the clock of the worker that does so, and not before."""
    stop = run.entries.get("~cancel")
    if stop is None or stop.settled_at is None or run.rewound or run.forked:
        return
    before = [
        each for each in run.recorded[run.before_epoch :] if each.settled_at and (each.seq or 0) < (stop.seq or 0)
    ]
    moved = max((each.settled_at or 0.0 for each in before), default=0.0)
    if stop.name == "timeout" and (record.deadline_at is None or stop.settled_at < record.deadline_at):
        world.witness.breaks(f"run {run.id} timed out at {stop.settled_at}, before {record.deadline_at}")
    if stop.name == "max_suspend" and stop.settled_at < moved + MAX_SUSPEND:
        world.witness.breaks(f"run {run.id} was suspended since {moved}, and that was too long at {stop.settled_at}")


def _check_compensations(world: Simulation, stage: Stage, run: RunModel) -> None:
    """A run that failed or was cancelled has undone all that it did; so has one that was tried again, of what failed.

    One that was terminated has not.
    """
    if run.ending is None or run.terminated or run.rewound:
        return
    unhappy = run.ending[0] is not RunStatus.SUCCEEDED
    done = run.recorded if unhappy else run.recorded[: run.before_retry]
    undoable = Counter(entry.location for entry in done if entry.name == "sim.undone" and _succeeded(entry))
    for location, times in sorted(undoable.items()):
        if stage.undos[run.id, location] < times and location not in run.undone_before:
            world.witness.breaks(f"run {run.id} is {run.ending[0]}, and {location} was not undone {times} times")
    if unhappy and run.recorded and not stage.exits[run.id]:
        world.witness.breaks(f"run {run.id} has ended, and what was to run at its end has not")


async def _check_nothing_is_left(world: Simulation) -> None:
    """When their time is over all runs go, and nothing of them stays."""
    ids = list(world.witness.models)
    await world.store.prune(world.loop.moment + A_LONG_TIME, 1_000)
    for run_id, snapshot in zip(ids, await world.store.load(ids), strict=True):
        left = [*await world.store.history(run_id), *await world.store.inbox(run_id)]
        if snapshot is not None or left:
            world.witness.breaks(f"run {run_id} is over for long, and is still there: {left}")


async def _check_streams(world: Simulation, run: RunModel) -> None:
    """What is on record as written is in the stream, once."""
    if run.rewound:
        return
    items = await world.store.stream(run.id, "log", 0, 1_000)
    if len(items) != run.streamed:
        world.witness.breaks(f"run {run.id} wrote {run.streamed} items to its stream, and there are {len(items)}")


def _succeeded(entry: Entry) -> bool:
    return entry.status is EntryStatus.SUCCEEDED
