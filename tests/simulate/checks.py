"""What must hold when all is calm: liveness, and an account of every event, record, compensation and outcome."""

import asyncio
import json
from collections import Counter
from typing import Any

from perdure import Client, RunStatus, RunTerminated, StoreError
from perdure.codec import JSON
from perdure.context import RunFacts
from perdure.inspection import examine
from perdure.records import Entry, EntryStatus, RunRecord
from perdure.runner.runner import Runner, RunStart
from perdure.store.base import Snapshot
from perdure.testing.simulate.witness import Picture
from perdure.testing.simulate.world import World
from tests.simulate.clients import Seen, all_records
from tests.simulate.events import ALL, BY_NAME, MAY_EXPIRE
from tests.simulate.programs import expected_of_run, plain, tree
from tests.simulate.stage import Stage

# --- liveness (guarantee 5) and read-only replay (7), while runs are open


def on_its_way(record: RunRecord) -> bool:
    """Whether time alone will move this run on."""
    return not record.status.terminal and (record.owner is not None or record.wake_at is not None)


async def check_quiet(world: World, client: Client) -> list[RunRecord]:
    """Nothing is on its way any more: who is open waits for something that is not there. Gives the open runs."""
    store, breaks = world.store, world.witness.breaks
    for finding in (await examine(client)).findings:
        if finding.severity == "error":
            breaks(f"doctor: {finding.text}")
    if owing := await store.unsettled():
        breaks(f"runs that have ended and still owe something: {[each.record.id for each in owing]}")
    if unfinished := await store.unfinished():
        breaks(f"events that are not assigned to all who stood: {[each.id for each in unfinished]}")
    open_runs = [record for record in await all_records(client) if not record.status.terminal]
    topics = {kind.__name__: await store.topic(f"sim.{kind.__name__.lower()}") for kind in ALL}
    for record in open_runs:
        _check_waits(world, record, await store.inbox(record.id), topics)
        if record.status is RunStatus.SUSPENDED and record.held is None:
            await _check_replay(world, record)
    return open_runs


def _check_waits(world: World, record: RunRecord, inbox: list[Any], topics: dict[str, Any]) -> None:
    now, breaks, run = world.loop.moment, world.witness.breaks, world.witness.pictures[record.id]
    if record.owner is not None:
        busy = any(body.run_id == record.id for body in world.bodies[-50:])
        if not busy and record.updated_at < now - 30.0:
            breaks(f"run {record.id} has an owner, and nothing happens to it")
        return
    if record.wake_at is not None and record.wake_at < now - 5.0:
        breaks(f"run {record.id} was due {now - record.wake_at:g} s ago")
    waits = {wait.name for wait in record.waits if wait.kind == "event"}
    names = {name for each in waits if each is not None for name in each.split(",")} - set(MAY_EXPIRE)
    for message in inbox:
        if message.kind == "event" and message.name in names and record.wake_at is None:
            breaks(f"run {record.id} waits for {message.name}, and {message.id} is in its mailbox")
    for kind in ("Shared",):
        if f"sim.{kind.lower()}" in names and topics[kind] and record.wake_at is None:
            breaks(f"run {record.id} waits for {kind}, and there is one in the topic")
    if not record.waits and record.held is None and record.wake_at is None:
        breaks(f"run {record.id} is {record.status} and waits for nothing ({run.status})")


async def _check_replay(world: World, record: RunRecord) -> None:
    """A suspended run, replayed without news, writes nothing and does nothing."""
    snapshot = (await world.store.load([record.id]))[0]
    if snapshot is None or any(True for _ in snapshot.inbox):
        return
    turn: Any = await _outside_of_a_task(world, lambda: _replay(snapshot, record.updated_at))
    if turn is None or (turn.wake_at is not None and turn.wake_at <= record.updated_at):
        return
    steps = [effect for effect in turn.effects if type(effect).__name__ == "RunStep"]
    if turn.entries or turn.consumed or steps or turn.outcome is not None or turn.held is not None:
        world.witness.breaks(f"run {record.id}: a replay without news came to {turn}")


def _replay(snapshot: Snapshot, now: float) -> Any:
    record = snapshot.record
    facts = RunFacts(
        id=record.id,
        workflow=record.workflow,
        version=record.version,
        generation=record.generation,
        tags=record.tags,
        parent=record.parent,
    )
    start = RunStart(
        definition=tree,
        facts=facts,
        input=record.input,
        seed=record.seed,
        begun_at=record.begun_at if record.begun_at is not None else record.created_at,
        history=snapshot.entries,
        deadline_at=record.deadline_at,
        codec=JSON,
        run_attempt=record.run_attempt,
        epoch=record.epoch,
        keys=(),
        waits=record.waits,
    )
    runner = Runner(start)
    try:
        return runner.advance(now, [])
    finally:
        runner.close()


async def _outside_of_a_task(world: World, work: Any) -> Any:
    done = world.loop.create_future()

    def carry_out() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    world.loop.call_soon(carry_out)
    return await done


async def nudge(world: World, client: Client, open_runs: list[RunRecord], round: int) -> None:
    """Give runs what they wait for, so that all of them can end."""
    for record in open_runs:
        for wait in record.waits:
            try:
                if wait.kind == "event" and wait.name is not None:
                    name = wait.name.split(",")[0]
                    await client.send(record.id, BY_NAME[name](f"nudge/{record.id}/{round}"))
                elif wait.kind == "deferred" and wait.name is not None:
                    await client.complete(await client.deferred_token(record.id, wait.name), round)
            except (RunTerminated, StoreError):
                continue
        if record.held is not None:
            if not _is_known(record, world.witness.pictures[record.id]):
                world.witness.breaks(f"run {record.id} is held: {record.held}")
            await client.terminate(record.id)
    await asyncio.sleep(0)


def _is_known(record: RunRecord, run: Picture) -> bool:
    """A sleep that was asked for and given up in one turn leaves no deadline on record for a rewind to open it with."""
    held = record.held
    cut = held is not None and held.kind == "diverged" and held.asked == "it without cancelling it" and run.rewound
    return cut and held is not None and (held.recorded or "").startswith("sleep ")


# --- the end


async def check_end(world: World, stage: Stage, seen: Seen, client: Client) -> None:
    """When nothing is open any more."""
    records = {record.id: record for record in await all_records(client)}
    _check_events(world, stage, seen, await _where_events_are(world, client))
    _check_seen(world, seen, records)
    for run_id, record in records.items():
        run = world.witness.pictures[run_id]
        _check_outcome(world, record, records)
        _check_compensations(world, stage, run)
        if record.drift and not run.rewound:  # what was asked for in the moment of a rewind's target sees another time
            world.witness.breaks(f"run {run_id}: a replay asked for {record.drift} with other arguments")
        await _check_streams(world, run)


class Places:
    """Where events are at the end, by their number."""

    def __init__(self) -> None:
        self.mail: Counter[str] = Counter()
        self.topics: Counter[str] = Counter()
        self.letters: Counter[str] = Counter()
        self.received: dict[str, list[str]] = {}
        self.put_back: set[str] = set()  # into the mailbox of a run that was rewound, and ended without it


async def _where_events_are(world: World, client: Client) -> Places:
    places = Places()
    for run in world.witness.pictures.values():
        places.mail.update(_number(each.body) for each in await world.store.inbox(run.id) if each.kind == "event")
        places.put_back.update(_number(message.body) for message in run.returned.values())
        for number in _taken_by(run):
            places.received.setdefault(number, []).append(run.id)
    for kind in ALL:
        places.topics.update(_number(each.body) for each in await world.store.topic(f"sim.{kind.__name__.lower()}"))
    for letter in await world.store.dead_letters(1_000):
        if letter.value is not None and letter.kind == "event":
            places.letters[_number(letter.value)] += 1
    return places


def _taken_by(run: Picture) -> list[str]:
    """The numbers of the events that its turns have consumed."""
    return [_number(message.body) for message in run.consumed.values()]


def _number(body: bytes | None) -> str:
    return str(json.loads(body or b"{}").get("n"))


def _check_events(world: World, stage: Stage, seen: Seen, places: Places) -> None:
    """Guarantee 4: each accepted event is in one place, and no rejected one is anywhere."""
    accepted: dict[str, tuple[str, Picture | None]] = {}
    for run in world.witness.pictures.values():
        for message in run.accepted.values():
            accepted[_number(message.body)] = (message.name, run)
    for event in world.witness.sent.values():
        accepted.setdefault(_number(event.body), (event.topic, None))
    for number, told in seen.sent.items():
        if told != "unsure" and (number in accepted) != (told == "ok"):
            world.witness.breaks(f"the sender of {number} was told {told}, and that is not so")
    rewound = {run.id for run in world.witness.pictures.values() if run.rewound}
    for number, (name, target) in accepted.items():
        readers = places.received.get(number, [])
        if rewound.intersection((number.split("/")[0], *readers)) or (target is not None and target.rewound):
            continue  # what it sent it has sent again, what it received it has received again
        wrong = _unaccounted(number, name, target, places)
        if wrong is not None:
            whom = "all" if target is None else target.id
            world.witness.breaks(f"event {name} {number} for {whom}: {wrong}")
    for run in world.witness.pictures.values():
        for message in run.consumed.values():
            if message.name not in MAY_EXPIRE and (run.id, _number(message.body)) not in stage.received:
                world.witness.breaks(f"run {run.id} took {message.name} {message.id}, and its workflow never had it")
        twice = [number for number, count in Counter(_received_by(run)).items() if count > 1]
        if twice and not run.rewound:
            world.witness.breaks(f"run {run.id} received {twice} more than once")


def _received_by(run: Picture) -> list[str]:
    """What its receives have on record; a loop may have dropped some before they were ever written."""
    values = [
        JSON.decode(entry.value)
        for entry in run.recorded
        if entry.kind.startswith("receive") and _succeeded(entry) and entry.value is not None
    ]
    return [each["n"] for value in values for each in (value if isinstance(value, list) else [value]) if "n" in each]


def _unaccounted(number: str, name: str, target: Picture | None, places: Places) -> str | None:
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


def _check_seen(world: World, seen: Seen, records: dict[str, RunRecord]) -> None:
    """Guarantees 1 and 6: what a client was told is still so."""
    for run_id, count in Counter(seen.created).items():
        if count > 1:
            world.witness.breaks(f"{count} clients were told that they had created {run_id}")
    for run_id, generation, status in seen.ends:
        if records[run_id].generation == generation and records[run_id].status != status:
            world.witness.breaks(f"a client saw {run_id} {status}, and it is {records[run_id].status}")
    for run_id, generation, location, value in seen.records:
        run = world.witness.pictures[run_id]
        entry = run.entries.get(location)
        if run.generation == generation and location not in run.pruned:
            now = None if entry is None or entry.value is None else JSON.decode(entry.value)
            if entry is None or now != value:
                world.witness.breaks(f"a client saw {location} of {run_id} as {value!r}, and it is {now!r}")
    firsts = Counter(token for _, token, first in seen.settled if first)
    for token, count in firsts.items():
        if count > 1:
            world.witness.breaks(f"{count} clients were the first to settle {token}")


def _check_outcome(world: World, record: RunRecord, records: dict[str, RunRecord]) -> None:
    """Guarantee 9: whatever went wrong around it, a run comes to what the model says."""
    ancestor: RunRecord | None = record
    while ancestor is not None:
        if world.witness.pictures[ancestor.id].touched:
            return
        ancestor = records.get(ancestor.parent) if ancestor.parent is not None else None
    if record.parent is not None and record.status is RunStatus.CANCELLED:
        return  # its parent's affair
    expected = expected_of_run(JSON.decode(record.first_input or record.input)["parts"])
    if expected is None:
        return
    if record.status is RunStatus.SUCCEEDED:
        outcome: Any = ("value", plain(JSON.decode(record.result or b"null")))
    else:
        outcome = ("error", record.error.type if record.error is not None else "RunCancelled")
    if outcome != expected:
        world.witness.breaks(f"run {record.id} came to {outcome}, and should have come to {expected}")


def _check_compensations(world: World, stage: Stage, run: Picture) -> None:
    """A run that failed or was cancelled has undone all that it did; one that was terminated has not."""
    if run.ending is None or run.ending[0] is RunStatus.SUCCEEDED or run.terminated or run.rewound:
        return
    undoable = {entry.location for entry in run.recorded if entry.name == "sim.undone" and _succeeded(entry)}
    for location in sorted(undoable):
        if not stage.undos[run.id, location]:
            world.witness.breaks(f"run {run.id} is {run.ending[0]}, and {location} was never undone")
    if run.recorded and not stage.exits[run.id]:
        world.witness.breaks(f"run {run.id} has ended, and what was to run at its end has not")


async def _check_streams(world: World, run: Picture) -> None:
    """What is on record as written is in the stream, once."""
    if run.rewound:
        return
    items = await world.store.stream(run.id, "log", 0, 1_000)
    if len(items) != run.streamed:
        world.witness.breaks(f"run {run.id} wrote {run.streamed} items to its stream, and there are {len(items)}")


def _succeeded(entry: Entry) -> bool:
    return entry.status is EntryStatus.SUCCEEDED
