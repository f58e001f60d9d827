"""EngineConfig: limits and intervals of an engine. A frozen value that is validated when it is created."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from perdure.errors import InvalidArgument
from perdure.model.validation import check_count, check_seconds, describe_value
from perdure.retry import Retry

Duration = float | timedelta
DAY = 86_400.0
COUNTS = (
    *("shards", "resident_runs", "max_concurrent_steps", "max_recoveries", "max_pending_events"),
    "max_payload_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and intervals of an engine. Durations are seconds or timedeltas and are converted to seconds.

    lease                lease duration; other workers fence a worker that has not renewed for this long
    shards               number of shards of the store; fixed when the store is created
    sweep_interval       interval of the periodic checks that find work whose notification was lost
    timer_resolution     timers that are due within this time of each other fire together
    resident_runs        maximum number of runs in memory, suspended ones included
    max_concurrent_steps maximum number of step bodies that execute concurrently in this process
    max_recoveries       recoveries after which a run is held as a poison run
    event_retention      retention of unconsumed topic events, and of the ids of consumed events
    max_pending_events   maximum number of unread events of a name in a mailbox, or in a topic; more are rejected
    max_payload_bytes    maximum size of one encoded value (argument, result, event, ...); larger ones are rejected
    run_retention        retention of ended runs
    store_retry          delays while the store is unavailable; a caller gives up after its attempts, a run does not
    grace                how long `shutdown` waits for running steps
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
    max_payload_bytes: int = 64 * 2**20
    run_retention: Duration = 30 * DAY
    store_retry: Retry = field(default_factory=lambda: Retry(max_attempts=12, initial=0.05, max_delay=5.0))
    grace: Duration = 10.0

    def __post_init__(self) -> None:
        for duration in ("lease", "sweep_interval"):
            self._set_seconds(duration, zero=False)
        for duration in ("timer_resolution", "event_retention", "run_retention", "grace"):
            self._set_seconds(duration, zero=True)
        for count in COUNTS:
            check_count(f"EngineConfig.{count}", getattr(self, count))
        if not isinstance(self.store_retry, Retry):
            raise InvalidArgument(f"EngineConfig.store_retry must be a Retry, not {describe_value(self.store_retry)}")
        if self.store_retry.max_elapsed is not None:
            raise InvalidArgument("EngineConfig.store_retry has a max_elapsed; use its max_attempts and max_delay")

    def _set_seconds(self, name: str, *, zero: bool) -> None:
        object.__setattr__(self, name, check_seconds(f"EngineConfig.{name}", getattr(self, name), zero=zero))

    def seconds(self, name: str) -> float:
        """Return a duration of this config in seconds."""
        value: float = getattr(self, name)
        return value
