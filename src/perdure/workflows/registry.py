"""Registry: the workflows or steps that this process has imported, by name and version. Knows only their identity."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from perdure.errors import WorkflowMisuse


class Registered(Protocol):
    """A definition that can be registered."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def origin(self) -> tuple[str, str]: ...


D = TypeVar("D", bound=Registered)


class Registry(Generic[D]):
    """Workflows by name and version.

    Several modules may define the same name and version. That is an error only when one of them must be selected.
    """

    def __init__(self, noun: str = "workflow") -> None:
        self._noun = noun
        self._definitions: dict[tuple[str, int], dict[tuple[str, str], D]] = {}
        self.revision = 0  # Incremented with every definition.

    def add(self, definition: D) -> None:
        """Register a definition. It replaces an earlier one with the same origin."""
        self.revision += 1
        self._definitions.setdefault((definition.name, definition.version), {})[definition.origin] = definition

    def find(self, name: str, version: int) -> D | None:
        """Return the definition of this name and version, or None. Raises `WorkflowMisuse` if there are several."""
        by_origin = self._definitions.get((name, version), {})
        if len(by_origin) > 1:
            raise WorkflowMisuse(self.describe_ambiguity(name, version))
        return next(iter(by_origin.values()), None)

    def latest(self, name: str) -> D | None:
        """Return the definition with the highest version of this name, or None."""
        versions = self.versions(name)
        return self.find(name, max(versions)) if versions else None

    def versions(self, name: str) -> list[int]:
        """Return the versions of this name."""
        return [version for known, version in self._definitions if known == name]

    def unambiguous(self) -> dict[tuple[str, int], D]:
        """Return all definitions whose name and version are defined once."""
        return {
            key: next(iter(by_origin.values())) for key, by_origin in self._definitions.items() if len(by_origin) == 1
        }

    def all(self) -> list[D]:
        """Return all definitions, also several of one name and version."""
        return [definition for by_origin in self._definitions.values() for definition in by_origin.values()]

    def ambiguous(self) -> list[tuple[str, int]]:
        """Return name and version of all workflows that are defined more than once."""
        return [key for key, by_origin in self._definitions.items() if len(by_origin) > 1]

    def describe_ambiguity(self, name: str, version: int) -> str:
        """Return which definitions of this name and version there are, and what to do."""
        origins = " and ".join(f"{module}.{qualname}" for module, qualname in self._definitions[name, version])
        if self._noun != "workflow":
            return f"{self._noun} {name!r} is defined in {origins}; give one of them another name"
        return f"workflow {name!r} version {version} is defined in {origins}; name one in Engine(workflows=[...])"
