"""Test that the reference names everything that is public, and that no link between pages is broken."""

import dataclasses
import re
from pathlib import Path

import pytest

import perdure
from perdure import Client, Context, Engine, EngineConfig, Retry, Run, RunStatus
from perdure.workflows.children import Child
from perdure.workflows.deferreds import Deferred
from perdure.workflows.definition import WorkflowOptions
from perdure.workflows.events import EventOptions
from perdure.workflows.messages import Request
from perdure.workflows.step_context import CurrentStep
from perdure.workflows.steps import StepOptions
from perdure.workflows.streams import Stream

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")

# Called only by a handle, by `async with` or by the engine.
INTERNAL = {"open", "request_cancel"}

# Only code spans and code blocks document a name, not words of a sentence.
CODE = "\n".join(re.findall(r"```.*?```|`[^`]+`", REFERENCE, re.DOTALL))


def _named(name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", CODE) is not None


def test_every_public_name_is_in_the_reference():
    assert [name for name in perdure.__all__ if not _named(name)] == []


@pytest.mark.parametrize("kind", [Client, Engine, Run, Context, Child, Deferred, Request, Stream, CurrentStep])
def test_every_method_is_in_the_reference(kind):
    methods = {name for name in dir(kind) if not name.startswith("_")} - INTERNAL
    assert {name for name in methods if not _named(name)} == set()


@pytest.mark.parametrize("value", [EngineConfig, Retry, WorkflowOptions, StepOptions, EventOptions])
def test_every_setting_is_in_the_reference(value):
    assert [field.name for field in dataclasses.fields(value) if not _named(field.name)] == []


def test_every_status_is_in_the_reference():
    assert [status for status in RunStatus if not _named(status)] == []


def test_no_link_is_broken():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if re.match(r"https?:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
