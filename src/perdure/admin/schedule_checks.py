"""Checks of schedules: those that code declared once and does not declare any more."""

from __future__ import annotations

from collections.abc import Sequence, Set

from perdure.admin.findings import Findings
from perdure.client.client import Client
from perdure.client.schedule_views import ScheduleDescription

PAGE = 500


async def find_undeclared(client: Client, declared: Set[str]) -> list[ScheduleDescription]:
    """Return the schedules that were declared by code and are not among these ids, in order of id."""
    found: list[ScheduleDescription] = []
    after: str | None = None
    while True:
        page = await client.schedules(after=after, limit=PAGE)
        found += [each for each in page if each.declared_by is not None and each.id not in declared]
        if len(page) < PAGE:
            return found
        after = page[-1].id


def add_undeclared(findings: Findings, schedules: Sequence[ScheduleDescription]) -> None:
    """Add a finding for each schedule that the code does not declare any more."""
    for schedule in schedules:
        text = f"schedule {schedule.id} was declared by {schedule.declared_by}, and the code does not declare it"
        findings.add("undeclared_schedule", "warning", text, "perdure schedules prune --app TARGET", schedule.id)
