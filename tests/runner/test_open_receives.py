"""Which open receive gets which message: the same as by a search of all of them, at a cost that does not grow."""

import random
from asyncio import Future
from contextvars import Context as VariableContext
from typing import Any

import msgspec
import pytest

from perdure import Context
from perdure.codec import JSON
from perdure.model.records import Message, RunResult, RunStatus
from perdure.model.turns import MessageReceived
from perdure.runner.mailbox import Mailbox
from perdure.runner.open_receives import OpenReceives
from perdure.runner.pending import PendingEntry
from perdure.runner.turn_extras import TurnExtrasBuilder
from perdure.workflows.commands import Command, ReceiveFilter
from perdure.workflows.context import RunInfo
from tests.runner.test_cost_of_branches import FACTOR, FEW, MANY, count_calls
from tests.runner.turn_driver import Play

INFO = RunInfo(id="r", workflow="w", version=1, generation=0, tags={}, parent=None)
NAMES = ("a", "b", "c")
COMPLETION = msgspec.json.encode(RunResult(RunStatus.SUCCEEDED, b"1"))


class Model:
    """Open receives and messages, searched one by one."""

    def __init__(self) -> None:
        self.receives: list[PendingEntry] = []
        self.messages: list[Message] = []

    def next_receiver(self) -> PendingEntry | None:
        found = [(number, at) for at, each in enumerate(self.receives) if (number := self._earliest(each)) is not None]
        return self.receives[min(found)[1]] if found else None

    def _earliest(self, receive: PendingEntry) -> int | None:
        command = receive.command
        assert command is not None
        if command.deferred is not None:
            found = [each for each in self.messages if each.kind == "deferred" and each.name == command.deferred]
        else:
            wanted = command.wants.types if command.wants is not None else {}
            found = [each for each in self.messages if each.kind == "event" and each.name in wanted]
            found = found or [each for each in self.messages if each.target == receive.target]
        return min((each.number for each in found), default=None)


def new_receive(location: str, rng: random.Random) -> PendingEntry:
    pending = PendingEntry(location, "receive", "", 0, 0, 0, 0.0, Future.__new__(Future), None, None)
    if rng.random() < 0.3:
        pending.command = Command(kind="deferred", name="", segment="", deferred=rng.choice(NAMES))
    else:
        names = rng.sample(NAMES, rng.randint(1, 2))
        wants = ReceiveFilter(dict.fromkeys(names, Any), rng.choice((1, 1, 3)))
        pending.command = Command(kind="receive", name="", segment="", wants=wants)
    return pending


def new_message(number: int, model: Model, rng: random.Random) -> Message:
    kind, name = rng.choice(("event", "event", "deferred", "assignment")), rng.choice(NAMES)
    receives = [each for each in model.receives if each.command is not None and each.command.wants is not None]
    target = None
    if kind == "assignment":
        known = {each.target for each in model.messages}
        free = [each for each in receives if each.target not in known]
        if not free:
            return Message(id=str(number), kind="event", number=number, name=name, body=b"1")
        receive = rng.choice(free)
        assert receive.command is not None
        assert receive.command.wants is not None
        target, name = receive.target, rng.choice(list(receive.command.wants.types))
    if kind == "deferred" and any(each.kind == kind and each.name == name for each in model.messages):
        kind = "event"
    body = COMPLETION if kind == "deferred" else b"1"
    return Message(id=str(number), kind=kind, number=number, name=name, body=body, target=target)


@pytest.mark.parametrize("seed", range(100))
def test_each_message_goes_to_the_receive_that_a_search_finds(seed):
    rng = random.Random(seed)
    mailbox, receives, model = Mailbox(INFO, JSON, TurnExtrasBuilder(), VariableContext()), OpenReceives(), Model()
    for number in range(1, 40):
        match rng.randrange(4):
            case 0 | 1:
                message = new_message(number, model, rng)
                mailbox.add(message)
                model.messages.append(message)
            case 2:
                receive = new_receive(f"r{number}", rng)
                receives.add(receive)
                model.receives.append(receive)
            case 3 if model.receives:  # cancelled or timed out
                receive = model.receives.pop(rng.randrange(len(model.receives)))
                receives.remove(receive.location)
                model.messages = [each for each in model.messages if each.target != receive.target]
                mailbox.release_unwanted({each.location: each for each in model.receives})
        if rng.random() < 0.5:
            continue
        while True:
            expected = model.next_receiver()
            assert mailbox.next_receiver(receives) is expected
            if expected is None:
                break
            taken = mailbox.take_for(expected, 0.0)
            assert taken
            receives.remove(expected.location)
            model.receives.remove(expected)
            model.messages = [each for each in model.messages if each not in taken]
            model.messages = [each for each in model.messages if each.target != expected.target]
            mailbox.release_unwanted({each.location: each for each in model.receives})


# --- cost


async def receives_of_one_name(ctx: Context, count: int) -> int:
    return len(await ctx.join(*(ctx.receive("x") for _ in range(count))))


async def receives_of_many_names(ctx: Context, count: int) -> int:
    return len(await ctx.join(*(ctx.receive(f"x{number}") for number in range(count))))


async def waits_for_deferreds(ctx: Context, count: int) -> int:
    async def wait(number: int) -> Any:
        return await ctx.deferred(f"x{number}", int)

    return len(await ctx.join(*(wait(number) for number in range(count))))


def calls_per_branch(program: Any, count: int) -> tuple[float, float]:
    """Return the calls of the runner per branch, live and on replay."""
    play = Play(program, count).begin()
    for number in range(count):
        if program is waits_for_deferreds:
            body = b'{"result": "MQ=="}'
            play.add_message("deferred", f"x{number}", body=body, id=f"deferred/0/x{number}")
        else:
            play.add_message("event", "x" if program is receives_of_one_name else f"x{number}", 1)
    inputs = [MessageReceived(message) for message in play.inbox.values()]
    live = count_calls(lambda: play.advance(*inputs))
    assert play.value == count
    replayed = Play(program, count, rows=play.rows)
    replay = count_calls(replayed.begin)
    assert replayed.value == count
    return live / count, replay / count


@pytest.mark.parametrize("program", [receives_of_one_name, receives_of_many_names, waits_for_deferreds])
def test_cost_of_a_receive_does_not_depend_on_the_number_of_others(program):
    few_live, few_replay = calls_per_branch(program, FEW)
    many_live, many_replay = calls_per_branch(program, MANY)
    assert many_live < FACTOR * few_live
    assert many_replay < FACTOR * few_replay
