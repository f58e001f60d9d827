"""Imports point down, and there are no cycles.

Every import counts, wherever it is written: at the top, inside a function, under `TYPE_CHECKING`, or as a literal
given to `import_module`. An import hidden in a function is still a dependency.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.tidy.sources import Module, package_modules, read_modules

# Room -> layer, after ARCHITECTURE.md. The longest name that fits a module decides; a name stands for all below it.
LAYERS = {
    "perdure.errors": 1,
    "perdure.records": 1,
    "perdure.codec": 1,
    "perdure.payloads": 1,
    "perdure.clock": 1,
    "perdure.names": 1,
    "perdure.failures": 1,
    "perdure.config": 2,
    "perdure.attempt": 2,
    "perdure.retry": 2,
    "perdure.durable": 2,
    "perdure.branches": 2,
    "perdure.steps": 2,
    "perdure.events": 2,
    "perdure.structure": 2,
    "perdure.definition": 2,
    "perdure.children": 2,
    "perdure.deferreds": 2,
    "perdure.loops": 2,
    "perdure.questions": 2,
    "perdure.receiving": 2,
    "perdure.rollback": 2,
    "perdure.showing": 2,
    "perdure.context": 2,
    "perdure.runner": 2,
    "perdure.starting": 2,
    "perdure.tokens": 2,
    "perdure.store.base": 3,
    "perdure.store": 4,
    "perdure.engine": 4,
    "perdure.cluster": 4,
    "perdure.ids": 1,
    "perdure.views": 5,
    "perdure.handle": 5,
    "perdure.rewinding": 5,
    "perdure.connection": 5,
    "perdure.messaging": 5,
    "perdure.letters": 5,
    "perdure.streams": 5,
    "perdure.client": 5,
    "perdure.worker": 5,
    "perdure.embedded": 5,
    "perdure.stores": 5,
    "perdure.scripting": 5,
    "perdure.inspection": 5,
    "perdure.mending": 5,
    "perdure.rehearsal": 5,
    "perdure.exported": 5,
    "perdure.transfer": 5,
    "perdure.http": 6,
    "perdure.cli": 6,
    "perdure.observe": 6,
    "perdure.testing": 6,
}

# `store/__init__.py` runs whenever `store.base` is imported, so it may know no more than the seam does.
EXACT_LAYERS = {"perdure.store": 3}

# No room of a group imports a room of another one in the same group.
BLIND = [
    ("perdure.store", "perdure.engine", "perdure.cluster"),
    ("perdure.store.memory", "perdure.store.sqlite", "perdure.store.postgres", "perdure.store.redis"),
]
# The seam belongs to the layer below: everyone may see it.
SEAM = ("perdure.store", "perdure.store.base")

# Who -> whom, why.
FORBIDDEN = [
    ("perdure.http", "perdure.store", "the edges speak to the client, never to a store"),
    ("perdure.cli", "perdure.store", "the edges speak to the client, never to a store"),
    ("perdure.observe", "perdure.store", "the edges speak to the client, never to a store"),
    ("perdure.runner", "perdure.clock", "the runner is given the time with its inputs"),
]


def test_imports_point_down():
    faults = list(layer_faults(package_modules()))
    assert not faults, "\n".join(faults)


def test_no_room_imports_what_it_must_not_know():
    faults = list(knowledge_faults(package_modules()))
    assert not faults, "\n".join(faults)


def test_no_cycles():
    assert cycle(package_modules()) is None


def layer_faults(modules: Mapping[str, Module]) -> Iterator[str]:
    for module in _inside(modules):
        layer = layer_of(module.name)
        if layer is None:
            yield f"{module.name} has no layer; give it one in LAYERS, or put it into a room that has"
            continue
        for target in imported(module, modules):
            target_layer = layer_of(target)
            if target_layer is not None and target_layer > layer:
                yield f"{module.name} (layer {layer}) imports {target} (layer {target_layer})"


def knowledge_faults(modules: Mapping[str, Module]) -> Iterator[str]:
    for module in _inside(modules):
        for target in imported(module, modules):
            if target == "perdure":
                yield f"{module.name} imports perdure itself; import from the room that defines the name"
            if within(target, "perdure.testing") and not within(module.name, "perdure.testing"):
                yield f"{module.name} imports {target}; nothing in the package imports testing"
            for who, whom, why in FORBIDDEN:
                if within(module.name, who) and within(target, whom):
                    yield f"{module.name} imports {target}: {why}"
            for group in BLIND:
                mine, theirs = _room(module.name, group), _room(target, group)
                if mine and theirs and mine != theirs and target not in SEAM:
                    yield f"{module.name} imports {target}: they must not know each other"


def cycle(modules: Mapping[str, Module]) -> str | None:
    """A cycle of imports, as `a -> b -> a`, or None."""
    graph = {module.name: imported(module, modules) for module in modules.values()}
    for module in _inside(modules):
        # To import `a.b.c` runs `a.b` first: a dependency of everyone who is not in `a.b` himself.
        graph[module.name] = graph[module.name] | {
            package
            for target in graph[module.name]
            for package in _packages(target)
            if package != "perdure" and not within(module.name, package)
        }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return None


def layer_of(name: str) -> int | None:
    if name in EXACT_LAYERS:
        return EXACT_LAYERS[name]
    room = _room(name, LAYERS)
    return LAYERS[room] if room else None


def imported(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """The modules of the package that this one names in an import, whoever executes it."""
    return {name for name in _import_names(module, modules) if within(name, "perdure")} - {module.name}


def _import_names(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, module)
            submodules = (f"{origin}.{alias.name}" for alias in node.names)
            yield from (name if name in modules else origin for name in submodules)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def _origin(node: ast.ImportFrom, module: Module) -> str:
    """The absolute name of the module after `from`."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    above = node.level - 1 if module.is_package else node.level
    base = parts[: len(parts) - above]
    return ".".join([*base, node.module] if node.module else base)


def _inside(modules: Mapping[str, Module]) -> Iterator[Module]:
    """All but `perdure/__init__.py`, which shows names of every layer."""
    return (module for name, module in modules.items() if name != "perdure")


def _packages(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _room(name: str, rooms: Iterable[str]) -> str | None:
    return max((room for room in rooms if within(name, room)), key=len, default=None)


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


# The checks themselves, on small packages that break the rules.


@pytest.fixture
def package(tmp_path):
    def make(files: dict[str, str]) -> dict[str, Module]:
        for name, source in {"__init__.py": "", **files}.items():
            path = tmp_path / "perdure" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return read_modules(tmp_path / "perdure")

    return make


@pytest.mark.parametrize(
    "statement",
    [
        "import perdure.client",
        "from perdure import client",
        "from perdure.client import Client",
        "from . import client",
        "from .client import Client",
        "def later():\n    from perdure.client import Client",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from perdure.client import Client",
        "import importlib\nimportlib.import_module('perdure.client')",
    ],
)
def test_an_import_that_points_up_is_found(package, statement):
    modules = package({"records.py": statement, "client.py": ""})
    assert list(layer_faults(modules)) == ["perdure.records (layer 1) imports perdure.client (layer 5)"]


def test_relative_imports_are_resolved_in_packages_too(package):
    modules = package(
        {"runner/__init__.py": "from ..client import x", "runner/loop.py": "from ..client import x", "client.py": ""}
    )
    assert len(list(layer_faults(modules))) == 2


def test_a_module_without_a_layer_is_found(package):
    assert "perdure.stray has no layer" in next(layer_faults(package({"stray.py": ""})))


def test_the_store_package_itself_knows_only_the_seam(package):
    files = {"store/__init__.py": "from perdure.store.memory import x", "store/memory.py": "", "store/base.py": ""}
    assert list(layer_faults(package(files))) == ["perdure.store (layer 3) imports perdure.store.memory (layer 4)"]


@pytest.mark.parametrize(
    ("who", "whom", "allowed"),
    [
        ("engine/committer.py", "store/sqlite.py", False),
        ("engine/committer.py", "store/base.py", True),
        ("engine/committer.py", "cluster/shards.py", False),
        ("engine/committer.py", "engine/executor.py", True),
        ("cluster/shards.py", "engine/executor.py", False),
        ("store/sqlite/commit.py", "engine/executor.py", False),
        ("store/sqlite/commit.py", "store/memory.py", False),
        ("store/sqlite/commit.py", "store/sqlite/schema.py", True),
        ("store/sqlite/commit.py", "store/pages.py", True),
        ("stores.py", "store/sqlite.py", True),
        ("http/app.py", "store/base.py", False),
        ("cli/app.py", "store/sqlite.py", False),
        ("testing/contract.py", "store/base.py", True),
        ("worker.py", "testing/clock.py", False),
        ("testing/plugin.py", "testing/clock.py", True),
        ("runner/loop.py", "clock.py", False),
        ("client.py", "__init__.py", False),
    ],
)
def test_who_may_know_whom(package, who, whom, allowed):
    target = "perdure." + whom.removesuffix(".py").replace("/", ".")
    modules = package({whom: "", who: f"import {target.removesuffix('.__init__')}"})
    assert (list(knowledge_faults(modules)) == []) is allowed


def test_a_cycle_is_found_and_named(package):
    modules = package(
        {
            "client.py": "import perdure.worker",
            "worker.py": "def f():\n    import perdure.stores",
            "stores.py": "import perdure.client",
        }
    )
    found = cycle(modules)
    assert found is not None
    names = found.split(" -> ")
    assert names[0] == names[-1]
    assert set(names) == {"perdure.client", "perdure.worker", "perdure.stores"}


def test_a_cycle_through_a_package_that_is_run_on_the_way_is_found(package):
    modules = package(
        {
            "runner/__init__.py": "from perdure.runner.loop import Loop",
            "runner/loop.py": "from perdure.context import Context",
            "runner/names.py": "",
            "context.py": "import perdure.runner.names",
        }
    )
    assert cycle(modules) is not None


def test_a_package_that_shows_names_of_its_own_modules_is_no_cycle(package):
    modules = package(
        {
            "runner/__init__.py": "from perdure.runner.loop import Loop",
            "runner/loop.py": "from perdure.runner.names import x",
            "runner/names.py": "",
        }
    )
    assert cycle(modules) is None
