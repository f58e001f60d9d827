"""KnownTypes: the definitions that a client knows, to start runs by name and to decode recorded values.

The workflows of the client's engine come before those that the process has imported. This module knows no store.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from perdure.codec import Codec
from perdure.errors import InvalidPayload, WorkflowMisuse
from perdure.model.records import Entry, EntryStatus, Message, RunRecord
from perdure.workflows.definition import REGISTRY, Workflow
from perdure.workflows.events import event_class
from perdure.workflows.internal import INTERNAL, is_internal_name
from perdure.workflows.messages import received_messages
from perdure.workflows.steps import STEPS, Raises

CHILD_KINDS = ("child", "result", "outcome")
RECEIVE_KINDS = ("receive", "receive_request")


class KnownTypes:
    """Definitions by name, and the types of recorded values that follow from them."""

    def __init__(self) -> None:
        self._own: Mapping[tuple[str, int], Workflow[Any, Any]] = {}
        self._own_only = False

    def use(self, own: Mapping[tuple[str, int], Workflow[Any, Any]], *, own_only: bool) -> None:
        """Set the workflows of the engine. `own_only`: its list is fixed, so a name in it means no other version."""
        self._own, self._own_only = own, own_only

    def find(self, name: str, version: int) -> Workflow[Any, Any] | None:
        """Return the definition of this name and version; None if there is none, or more than one."""
        if is_internal_name(name):
            return INTERNAL.find(name, version)
        own = self._own.get((name, version))
        if own is not None:
            return own
        try:
            return REGISTRY.find(name, version)
        except WorkflowMisuse:
            return None

    def latest(self, name: str) -> Workflow[Any, Any] | None:
        """Return the definition of this name with the highest version, or None.

        Raises `WorkflowMisuse` if two modules define it and it is not one of the engine's own.
        """
        own = [version for known, version in self._own if known == name]
        versions = own if own and self._own_only else [*own, *REGISTRY.versions(name)]
        if not versions:
            return None
        return self._own.get((name, max(versions))) or REGISTRY.find(name, max(versions))

    def result_type(self, record: RunRecord, definition: Workflow[Any, Any] | None = None) -> Any:
        """Return the type of a run's result."""
        definition = self._definition_of(record, definition)
        return Any if definition is None else definition.returns

    def raised_types(self, record: RunRecord, definition: Workflow[Any, Any] | None = None) -> Raises:
        """Return the types of errors that a run's workflow declares; none if it is not known."""
        definition = self._definition_of(record, definition)
        return () if definition is None else definition.settings.raises

    def _definition_of(self, record: RunRecord, definition: Workflow[Any, Any] | None) -> Workflow[Any, Any] | None:
        """Return the definition of a run: the given one, unless the run has continued as another workflow."""
        if definition is None or (definition.name, definition.version) != (record.workflow, record.version):
            return self.find(record.workflow, record.version)
        return definition

    def entry_decoder(self, record: RunRecord, codec: Codec) -> Callable[[Entry], Any]:
        """Return a function that decodes the values of a run's entries.

        A value is typed if the definition that recorded it is known and the value matches.
        """
        definition = self.find(record.workflow, record.version)
        module = None if definition is None else definition.origin[0]
        step_type = functools.cache(functools.partial(_step_type, module=module))

        def decode(entry: Entry) -> Any:
            if entry.value is None or entry.status is EntryStatus.PENDING:  # which has notes of its attempts
                return None
            try:
                if entry.kind == "receive_batch":
                    return [_decode_event(each, codec, module) for each in received_messages(entry)]
                kind = step_type(entry.name) if entry.kind == "step" else self._entry_type(entry, module)
                return codec.decode(entry.value, kind)
            except InvalidPayload:  # Other code has recorded it.
                return codec.decode(entry.value)

        return decode

    def _entry_type(self, entry: Entry, module: str | None) -> Any:
        if entry.kind in CHILD_KINDS:
            child = self._only_version(entry.name.removesuffix(f":{entry.kind}"))
            return Any if child is None else child.returns
        if entry.kind in RECEIVE_KINDS:
            names = [each.name for each in received_messages(entry)]
            return (event_class(names[0], module) or Any) if names else Any
        return Any

    def _only_version(self, name: str) -> Workflow[Any, Any] | None:
        versions = {version for known, version in self._own if known == name} | set(REGISTRY.versions(name))
        return self.find(name, versions.pop()) if len(versions) == 1 else None


def _step_type(name: str, module: str | None) -> Any:
    """Return the result type of a step, preferably of the workflow's module; `Any` if there are several steps."""
    steps = [(origin[0], step) for origin, step in STEPS.items() if step.name == name]
    found = [step for defined_in, step in steps if defined_in == module] or [step for _, step in steps]
    return found[0].body.returns if len(found) == 1 else Any


def _decode_event(message: Message, codec: Codec, module: str | None) -> Any:
    return codec.decode(message.body or b"null", event_class(message.name, module) or Any)
