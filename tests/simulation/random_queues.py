"""Work queues of a simulation: what workers declare, random options of starts, and random calls about queues."""

import random
from typing import Any

from perdure import Client, Debounce, InvalidArgument, QueueFull, QueueNotFound, Rate, WorkQueue

REFUSALS = (InvalidArgument, QueueFull, QueueNotFound)
NAMES = ("sim.narrow", "sim.wide", "sim.parts", "sim.rated")
PARTITIONS = ("a", "b", "c")
KEYS = ("k", "l")


def declare_queues() -> list[WorkQueue]:
    """Return new definitions of all queues. A process registers them for as long as they are referenced."""
    return [
        WorkQueue("sim.narrow", concurrency=1, max_waiting=6),
        WorkQueue("sim.wide", concurrency=3, worker_concurrency=1),
        WorkQueue("sim.parts", concurrency=3, partition_key=_first_partition, partition_concurrency=1),
        WorkQueue("sim.rated", rate=Rate(2, per=2.0)),
    ]


def _first_partition(parts: Any) -> str:
    return PARTITIONS[len(parts) % len(PARTITIONS)]


def draw_start_options(rng: random.Random, run_id: str) -> dict[str, Any]:
    """Return random options of a start; half of the starts use no queue."""
    queue = rng.choice((*NAMES, None, None))
    if queue is None:
        return {"id": run_id}
    options: dict[str, Any] = {"queue": queue, "priority": rng.choice((-1, 0, 0, 0, 2))}
    if queue == "sim.parts":
        options["partition"] = rng.choice(PARTITIONS)
    if rng.random() < 0.15:
        options["max_wait"] = rng.choice((0.5, 3.0, 30.0))
    if rng.random() < 0.2:
        options["debounce"] = Debounce(rng.choice(KEYS), quiet=0.7, max_wait=2.0, keep=rng.choice(("first", "last")))
        return options  # the first start names the run
    options["id"] = run_id
    if rng.random() < 0.2:
        options["delay"] = rng.choice((0.2, 1.5))
    if rng.random() < 0.4:
        options["dedupe"] = rng.choice(KEYS)
        options["on_duplicate"] = rng.choice(("existing", "replace", "refuse"))
    return options


async def control_queue(rng: random.Random, client: Client) -> str:
    """Make a random call about a queue and return its name."""
    queue = client.queue(rng.choice(NAMES))
    waiting = await queue.waiting()
    match rng.choice(("pause", "resume", "resume", "resize", "resize", "partition", "move", "release", "clear", "see")):
        case "pause":
            await queue.pause("simulated")
            return f"pauses {queue.name}"
        case "resume":
            await queue.resume()
            return f"resumes {queue.name}"
        case "resize":
            concurrency = rng.choice((1, 1, 2, 5))
            await queue.resize(concurrency=concurrency, reset=queue.name != "sim.narrow")
            return f"resizes {queue.name} to {concurrency}"
        case "partition":
            await (
                client.queue("sim.parts")
                .partition(rng.choice(PARTITIONS))
                .resize(concurrency=rng.choice((1, 2)), weight=rng.choice((1, 2)))
            )
            return "resizes a partition"
        case "move" if waiting:
            await queue.move(rng.choice(waiting).run_id, priority=rng.choice((-2, 1)))
            return "moves a run"
        case "release":
            held = await client._session.store.places(queue.name, held=rng.random() < 0.7)
            if not held:
                return "releases nothing"
            await queue.release(rng.choice(held).run_id)
            return "releases a run"
        case "clear" if rng.random() < 0.2:
            return f"clears {await queue.clear()} runs"
        case _:
            description = await queue.describe()
            return f"sees that {queue.name} is limited by {description.limited_by}"


async def open_all_queues(client: Client) -> None:
    """Resume all queues and reset their limits, so that all runs are admitted."""
    for name in NAMES:
        await client.queue(name).resume()
        await client.queue(name).resize(reset=True)
