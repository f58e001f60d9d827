"""The event types of simulated runs and clients, one for each delivery policy. `n` is unique per event."""

from typing import Any

from perdure import event


@event(name="sim.plain")
class Plain:
    n: str


@event(name="sim.passed", on_target_terminated="broadcast")
class Passed:
    n: str


@event(name="sim.precious", on_target_terminated="dead_letter")
class Precious:
    n: str


@event(name="sim.short", on_target_terminated="dead_letter", expire_after=2.0)
class Short:
    n: str


@event(name="sim.request")
class Request:
    n: str


@event(name="sim.shared")
class Shared:
    n: str


@event(name="sim.loud", delivery="after_wait")
class Loud:
    n: str


@event(name="sim.notice", consume=False)
class Notice:
    n: str


@event(name="sim.passing", expire_after=2.0)
class Passing:
    n: str


TARGETED: tuple[Any, ...] = (Plain, Passed, Precious, Short)
BROADCAST: tuple[Any, ...] = (Shared, Loud, Notice, Passing)
ALL: tuple[Any, ...] = (*TARGETED, *BROADCAST)
BY_NAME: dict[str, Any] = {f"sim.{kind.__name__.lower()}": kind for kind in (*ALL, Request)}
MAY_EXPIRE = ("sim.short", "sim.passing")
