"""Writes that qualify for the fast path of PostgreSQL and Redis, writes that do not, and scenarios before them."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.model.records import ErrorRecord, Hold, RunStatus, Wait
from perdure.model.turns import TurnExtras
from perdure.stores.protocol import Claim, Store
from perdure.stores.writes import ContinueAs, CreateRun, RunPatch, Write
from perdure.testing.contract.builders import (
    claim,
    deliver,
    end,
    entry,
    observe,
    observed,
    receive,
    run,
    succeeded,
    suspended,
    turn,
    worker,
)

CONTINUE_AS = ContinueAs(workflow="flow", version=1, input=b"{}", first_executed_at=None)
FAILED = ErrorRecord("builtins.ValueError", "no \0 way", location="charge")

ELIGIBLE: dict[str, Write] = {
    "a new run": run("new", owner="a", tags={"team": "a"}, deadline_at=500.0, retention=9.0, pool="p", shard=3),
    "a new run by default": run("new", owner="a"),
    "a new child": run("new", owner="a", parent="p", attached=True),
    "a step": turn(0, entry(seq=1, started_at=101.0, settled_at=102.0, fingerprint=b"f", detail=b"d", ordinal=3)),
    "a step that failed": turn(0, entry(value=None, error=FAILED, attempts=3)),
    "the end": turn(0, entry(), patch=succeeded(prune_at=900.0, drift=("charge",), recoveries=2)),
    "a bad end": turn(0, entry(), patch=RunPatch(status=RunStatus.FAILED, error=FAILED, ended_at=1.0)),
}

INELIGIBLE: dict[str, Write] = {
    "a new run without an owner": run("new"),
    "a new run that is observed": observed(run("new", owner="a")),
    "a fork": CreateRun(run("new", owner="a").record, entries=(entry(),)),
    "a turn without entries": turn(0, patch=succeeded()),
    "a turn of two entries": turn(0, entry("x"), entry("y", 1)),
    "a turn that does not claim ownership": turn(0, entry(), owned=False),
    "a turn that suspends its run": turn(0, entry(), patch=suspended(500.0)),
    "a turn that consumes a message": turn(0, entry(), seen=1, consumed=(1,)),
    "an end of a run that has seen messages": turn(0, entry(), seen=1, patch=succeeded()),
    "a turn that continues as new": turn(0, entry(), continue_as=CONTINUE_AS),
    "a turn that drops entries": turn(0, entry(), extras=TurnExtras(dropped=("x",))),
    "a message": deliver(),
}

# Writes and claims that come first, and an eligible write.
SCENARIOS: dict[str, tuple[Sequence[Write | Claim], Write]] = {
    **{name: ((), write) for name, write in ELIGIBLE.items()},
    "an id that is taken": ((), run(owner="a", created_by="another")),
    "a repeated creation": ((), run(owner="a")),
    "a new run of a fenced worker": ((), run("new", owner="b")),
    "a new run of an unknown worker": ((), run("new", owner="unknown")),
    "a repeated turn": ((turn(0, entry()),), turn(0, entry())),
    "a repeated end": ((turn(0, entry(), patch=succeeded()),), turn(0, entry(), patch=succeeded())),
    "a turn after the end": ((end(),), turn(0, entry())),
    "a turn from a stale position": ((turn(0, entry()),), turn(0, entry("late"), turn_id="late")),
    "a turn from a future position": ((), turn(3, entry())),
    "a turn of a missing run": ((), turn(0, entry(), id="missing")),
    "a turn of a run that another worker owns": ((), turn(0, entry(), worker="b")),
    "a turn of a run without an owner": ((turn(0, entry(), patch=suspended(500.0)),), turn(1, entry())),
    "a turn of a fenced worker": ((run("theirs", owner="b"),), turn(0, entry(), id="theirs", worker="b")),
    "a turn from before its run restarted": (
        (
            turn(0, entry(), continue_as=CONTINUE_AS, patch=RunPatch(status=RunStatus.RUNNING, wake_at=300.0)),
            claim(now=400.0),
        ),
        turn(0, entry("late"), turn_id="late"),
    ),
    "a turn with an unseen message": ((deliver(),), turn(0, entry())),
    "a turn with a seen message": ((deliver(),), turn(0, entry(), seen=1)),
    "an end with an unseen message": ((deliver(),), turn(0, entry(), patch=succeeded())),
    "an end with a seen message": ((deliver(),), turn(0, entry(), seen=1, patch=succeeded())),
    "a turn with an unseen message from before its claim": (
        (turn(0, entry(), patch=suspended()), deliver(), claim(now=400.0)),
        turn(1, entry("next", 1)),
    ),
    "an end of a run with a wake-up": (
        (turn(0, entry(), patch=RunPatch(status=RunStatus.RUNNING, owner="a", wake_at=500.0)),),
        turn(1, entry("next", 1), patch=succeeded()),
    ),
    "an end of a run that was suspended": (
        (turn(0, entry(), patch=suspended(300.0, waits=(Wait("timer", until=300.0),), drift=("x",))), claim(now=400.0)),
        turn(1, entry("next", 1), patch=succeeded()),
    ),
    "an end of a run that was recovered": (
        (turn(0, entry(), patch=suspended(300.0, recoveries=3)), claim(now=400.0)),
        turn(1, entry("next", 1), patch=succeeded()),
    ),
    "an end of a run that was held": (
        (turn(0, entry(), patch=suspended(300.0, held=Hold("step_failed", "why"))), claim(now=400.0)),
        turn(1, entry("next", 1), patch=succeeded()),
    ),
    "an end of a child": (
        (run("child", owner="a", parent="r", attached=True),),
        turn(0, entry(), id="child", patch=succeeded()),
    ),
    "an end of a run that has unsubscribed": (
        (receive(0, "t", patch=None), turn(1, extras=TurnExtras(unsubscribe=("0/receive",)))),
        turn(2, entry(), patch=succeeded()),
    ),
    "a turn after entries were dropped": (
        (turn(0, entry("x")), turn(1, entry("y", 1), extras=TurnExtras(dropped=("x",)))),
        turn(2, entry("z", 2)),
    ),
    "an end of an observed run": ((observe(),), turn(0, entry(), patch=succeeded())),
    "an end of a subscribed run": ((receive(0, "t", patch=None),), turn(1, entry(), patch=succeeded())),
}


async def prepare(store: Store, before: Sequence[Write | Claim]) -> None:
    """Let worker "a" own run "r", apply `before`, and fence worker "b"."""
    await store.join(worker("a"))
    await store.join(worker("b"))
    for each in (run(owner="a"), *before):
        await (store.claim(each) if isinstance(each, Claim) else store.commit([each]))
    await store.fence_worker("b")
