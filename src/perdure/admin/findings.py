"""Findings of a health check, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of the store. An error violates a guarantee or needs a person; a warning may be intended.

    `repair` names the action of `perdure.admin.repair` that fixes it, if there is one. The action applies to `subject`.
    """

    kind: str
    severity: str  # "error", "warning"
    text: str
    advice: str
    subject: str | None = None
    repair: str | None = None


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The result of a health check. `progress_reasons` counts the open runs by what will let them continue."""

    at: datetime
    open_runs: int
    progress_reasons: Mapping[str, int]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings)


class Findings:
    """Collects findings."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Finding] = {}

    def add(
        self, kind: str, severity: str, text: str, advice: str, subject: str | None = None, repair: str | None = None
    ) -> None:
        """Add a finding. A second one of the same kind and text is ignored."""
        self._found.setdefault((kind, text), Finding(kind, severity, text, advice, subject, repair))

    def add_unreadable(self, run_id: str, reason: str) -> None:
        """Add the finding of a run whose rows cannot be decoded."""
        text = f"Run {run_id} cannot be read: {reason}"
        advice = f"restore its rows from a backup, or end it: perdure terminate {run_id}"
        self.add("unreadable", "error", text, advice, run_id)

    def in_order(self) -> tuple[Finding, ...]:
        """Return the findings, errors first."""
        return tuple(
            sorted(self._found.values(), key=lambda finding: (finding.severity, finding.kind, finding.subject or ""))
        )
