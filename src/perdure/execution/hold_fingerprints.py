"""HoldFingerprints: which code has held a run, so that the same code does not try the run again."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from perdure.execution.run_cache import CachedRun
from perdure.model.records import CODE_HOLD_KINDS, Hold
from perdure.workflows.definition import Workflow
from perdure.workflows.fingerprint import code_fingerprint

MAX_FINGERPRINTS = 16  # of the code that could not continue a run; older ones may try again


class HoldFingerprints:
    """The fingerprints of the workflows of one worker, each computed once: a release may hold thousands of runs."""

    def __init__(self) -> None:
        self._known: dict[Workflow[Any, Any], str | None] = {}

    def fingerprint_of(self, definition: Workflow[Any, Any]) -> str | None:
        if definition not in self._known:
            self._known[definition] = code_fingerprint(definition.fn)
        return self._known[definition]

    def add_to(self, hold: Hold, cached: CachedRun) -> Hold:
        """Return a hold that the code of the workflow caused with the fingerprint of that code.

        Other code that was not able to continue from the same history either is named too.
        """
        if hold.kind not in CODE_HOLD_KINDS:
            return hold
        before = cached.record.held if cached.turns == 0 else None
        tried = dict.fromkeys(before.fingerprints if before is not None else ())
        if (own := self.fingerprint_of(cached.definition)) is not None:
            tried[own] = None
        return replace(hold, fingerprints=tuple(tried)[-MAX_FINGERPRINTS:])

    def may_continue(self, definition: Workflow[Any, Any], hold: Hold) -> bool:
        """Return whether this code has not held the run yet."""
        return not hold.fingerprints or self.fingerprint_of(definition) not in hold.fingerprints
