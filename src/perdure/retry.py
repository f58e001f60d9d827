"""Retry: how often, after what pause, and for which errors something is tried again. A pure value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from perdure.errors import CriticalError, InvalidArgument
from perdure.model.validation import check_count, check_seconds

RetryOn = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], bool]


@dataclass(frozen=True, slots=True)
class Retry:
    """`max_attempts` counts the first try. The pause grows from `initial` by `factor` up to `max_delay`, give or take
    `jitter`; `delay(attempt)`, a function of the attempt that just failed, replaces all of that.
    """

    max_attempts: int = 4
    initial: float | timedelta = 0.1
    factor: float = 2.0
    max_delay: float | timedelta = 30.0
    jitter: float = 0.1
    retry_on: RetryOn = Exception
    delay: Callable[[int], float | timedelta] | None = None

    def __post_init__(self) -> None:
        check_count("Retry.max_attempts", self.max_attempts)
        check_seconds("Retry.initial", self.initial)
        check_seconds("Retry.max_delay", self.max_delay)
        if not self.factor >= 1.0:
            raise InvalidArgument(f"Retry.factor must be at least 1, not {self.factor}")
        if not 0.0 <= self.jitter <= 1.0:
            raise InvalidArgument(f"Retry.jitter must be between 0 and 1, not {self.jitter}")
        types = self.retry_on if isinstance(self.retry_on, tuple) else (self.retry_on,)
        if not all(callable(kind) for kind in types):
            raise InvalidArgument("Retry.retry_on must be an exception type, a tuple of them, or a predicate")

    def should_retry(self, error: BaseException) -> bool:
        """Whether this error is worth another attempt; a `CriticalError` never is."""
        if isinstance(error, CriticalError):
            return False
        if isinstance(self.retry_on, (type, tuple)):
            return isinstance(error, self.retry_on)
        return bool(self.retry_on(error))

    def delay_after(self, attempt: int, chance: float) -> float:
        """Seconds to wait after this attempt failed; `chance` in [0, 1) places it within the jitter."""
        if self.delay is not None:
            return check_seconds("Retry.delay(attempt)", self.delay(attempt))
        most = check_seconds("Retry.max_delay", self.max_delay)
        first = check_seconds("Retry.initial", self.initial)
        try:
            pause = min(most, first * self.factor ** (attempt - 1))
        except OverflowError:
            pause = most
        return pause * (1.0 + self.jitter * (2.0 * chance - 1.0))
