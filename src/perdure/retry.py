"""Retry: a retry policy. A pure value that reads no clock and draws no random numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from perdure.errors import CriticalError, InvalidArgument
from perdure.model.validation import check_count, check_number, check_seconds

LOGGER = logging.getLogger("perdure.execution")

RetryOn = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, after what delay and for which errors an operation is retried.

    `max_attempts` includes the first attempt. The delay starts at `initial` and grows by `factor` up to `max_delay`,
    plus or minus the fraction `jitter`. If `delay` is given, it is called with the number of the failed attempt and
    returns the delay. An attribute `retry_after` of an error (seconds or a timedelta) takes precedence over both.

    `max_elapsed` bounds the time over all attempts, from the start of the first one. An attempt that is running by then
    is cancelled and fails with `TimeoutError`. An attempt that would start later is not made.
    """

    max_attempts: int = 4
    initial: float | timedelta = 0.1
    factor: float = 2.0
    max_delay: float | timedelta = 30.0
    jitter: float = 0.1
    retry_on: RetryOn = Exception
    delay: Callable[[int], float | timedelta] | None = None
    max_elapsed: float | timedelta | None = None

    def __post_init__(self) -> None:
        check_count("Retry.max_attempts", self.max_attempts)
        check_seconds("Retry.initial", self.initial)
        check_seconds("Retry.max_delay", self.max_delay)
        check_number("Retry.factor", self.factor, 1.0)
        check_number("Retry.jitter", self.jitter, 0.0, 1.0)
        if self.max_elapsed is not None:
            check_seconds("Retry.max_elapsed", self.max_elapsed, zero=False)
        types = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        if not all(callable(kind) for kind in types):
            raise InvalidArgument("Retry.retry_on must be an exception type, a tuple of them, or a predicate")

    def should_retry(self, error: BaseException) -> bool:
        """Return True if this error may be retried. A `CriticalError` is never retried."""
        if isinstance(error, CriticalError):
            return False
        if isinstance(self.retry_on, (type, tuple)):
            return isinstance(error, self.retry_on)
        return bool(self.retry_on(error))

    def retry_until(self, since: float) -> float | None:
        """Return the time at which `max_elapsed` is over for attempts that started at `since`, None without limit."""
        return None if self.max_elapsed is None else since + check_seconds("Retry.max_elapsed", self.max_elapsed)

    def delay_after(self, attempt: int, fraction: float) -> float:
        """Return the delay in seconds after a failed attempt; `fraction` in [0, 1) selects a point in the jitter."""
        if self.delay is not None:
            return check_seconds("Retry.delay(attempt)", self.delay(attempt))
        max_delay = check_seconds("Retry.max_delay", self.max_delay)
        initial = check_seconds("Retry.initial", self.initial)
        try:
            delay = min(max_delay, initial * self.factor ** (attempt - 1))
        except OverflowError:
            delay = max_delay
        return delay * (1.0 + self.jitter * (2.0 * fraction - 1.0))


def read_retry_after(error: BaseException, what: str, extra: Mapping[str, str]) -> float | None:
    """Return the pause in seconds that an error requests in its attribute `retry_after`, or None.

    A value that is no duration is logged and ignored: other libraries may use the name for something else.
    """
    try:
        wanted = getattr(error, "retry_after", None)
        return None if wanted is None else check_seconds("retry_after", wanted)
    except Exception as refused:  # not only InvalidArgument: a property of the user's exception may raise
        reason = str(refused) if isinstance(refused, InvalidArgument) else repr(refused)
        LOGGER.warning(
            "%s: retry_after of %s is ignored: %s; the pause follows the retry policy",
            what,
            type(error).__name__,
            reason,
            extra=dict(extra),
        )
        return None
