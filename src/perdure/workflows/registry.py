"""Registry: the workflows that this process has imported, by name and version."""

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
    """Workflows by name and version. Two places may define the same one; that is an error only for who must choose."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], dict[tuple[str, str], D]] = {}
        self.revision = 0  # goes up with every definition

    def add(self, made: D) -> None:
        self.revision += 1
        self._found.setdefault((made.name, made.version), {})[made.origin] = made

    def find(self, name: str, version: int) -> D | None:
        """The one definition of this name and version; `WorkflowMisuse` if there are several."""
        places = self._found.get((name, version), {})
        if len(places) > 1:
            where = " and ".join(f"{module}.{qualname}" for module, qualname in places)
            raise WorkflowMisuse(
                f"workflow {name!r} version {version} is defined in {where}; name one in Engine(workflows=[...])"
            )
        return next(iter(places.values()), None)

    def latest(self, name: str) -> D | None:
        """The highest version of this name."""
        versions = [version for found, version in self._found if found == name]
        return self.find(name, max(versions)) if versions else None

    def unambiguous(self) -> dict[tuple[str, int], D]:
        """Everything for which nobody must choose."""
        return {key: next(iter(places.values())) for key, places in self._found.items() if len(places) == 1}
