"""EngineConfig: the limits and intervals of an engine, in one frozen value. Bad values are refused when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from perdure.errors import InvalidArgument
from perdure.model.validation import check_count, check_seconds
from perdure.retry import Retry

Duration = float | timedelta
DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Durations are seconds or timedeltas; they read back as seconds.

    lease                a worker that has not renewed for this long is declared gone, and its runs go on elsewhere
    shards               slices of the store; fixed when it is created, another value later is an error
    sweep_interval       how often to look for what notifications may have missed
    timer_resolution     timers that are due within this time of each other are woken together
    resident_runs        runs kept in memory at most, waiting ones included
    max_concurrent_steps step bodies that execute at once in this process
    max_recoveries       workers that may die while executing a run before it is held as a poison run
    event_retention      how long unconsumed topic events, and the ids of consumed events, are kept
    max_pending_events   unread events a mailbox or topic may hold before it refuses more
    run_retention        how long finished runs are kept
    store_retry          pauses between tries while the store is away; a caller gives up after its attempts, runs do not
    grace                how long `shutdown` lets steps finish
    """

    lease: Duration = 15.0
    shards: int = 128
    sweep_interval: Duration = 5.0
    timer_resolution: Duration = 0.01
    resident_runs: int = 10_000
    max_concurrent_steps: int = 1_000
    max_recoveries: int = 10
    event_retention: Duration = 7 * DAY
    max_pending_events: int = 10_000
    run_retention: Duration = 30 * DAY
    store_retry: Retry = field(default_factory=lambda: Retry(max_attempts=12, initial=0.05, max_delay=5.0))
    grace: Duration = 10.0

    def __post_init__(self) -> None:
        for duration in ("lease", "sweep_interval"):
            self._set_seconds(duration, zero=False)
        for duration in ("timer_resolution", "event_retention", "run_retention", "grace"):
            self._set_seconds(duration, zero=True)
        for count in ("shards", "resident_runs", "max_concurrent_steps", "max_recoveries", "max_pending_events"):
            check_count(f"EngineConfig.{count}", getattr(self, count))
        if not isinstance(self.store_retry, Retry):
            raise InvalidArgument(f"EngineConfig.store_retry must be a Retry, not {self.store_retry!r}")

    def _set_seconds(self, name: str, *, zero: bool) -> None:
        object.__setattr__(self, name, check_seconds(f"EngineConfig.{name}", getattr(self, name), zero=zero))

    def seconds(self, name: str) -> float:
        """A duration of this config in seconds."""
        value: float = getattr(self, name)
        return value
