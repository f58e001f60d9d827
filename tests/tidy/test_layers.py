"""Imports point down, and there are no cycles.

Every import counts, wherever it is written: at the top, inside a function, under `TYPE_CHECKING`, or as a literal
given to `import_module`. An import hidden in a function is still a dependency.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.tidy.sources import Module, package_modules, read_modules

# Package or module -> layer, after ARCHITECTURE.md. The longest matching name decides; a name stands for all below it.
LAYERS = {
    "perdure.errors": 1,
    "perdure.clock": 1,
    "perdure.model": 1,
    "perdure.codec": 1,
    "perdure.retry": 2,
    "perdure.config": 2,
    "perdure.schedules": 2,
    "perdure.workflows": 2,
    "perdure.runner": 2,
    "perdure.stores.protocol": 3,
    "perdure.stores.writes": 3,
    "perdure.stores.results": 3,
    "perdure.stores": 4,
    "perdure.queues": 4,
    "perdure.execution": 4,
    "perdure.cluster": 4,
    "perdure.client": 5,
    "perdure.admin": 5,
    "perdure.engine": 5,
    "perdure.worker": 5,
    "perdure.script": 5,
    "perdure.cli": 6,
    "perdure.testing": 6,
}

# `stores/__init__.py` runs whenever `stores.protocol` is imported, so it may import no more than the protocol does.
EXACT_LAYERS = {"perdure.stores": 3}

# No package of a group imports a package of another one in the same group.
BLIND = [
    ("perdure.stores", "perdure.execution", "perdure.cluster"),
    ("perdure.stores.memory", "perdure.stores.sqlite", "perdure.stores.postgres", "perdure.stores.redis"),
]
# The store interface belongs to the layer below: every package may import it.
STORE_INTERFACE = ("perdure.stores", "perdure.stores.protocol", "perdure.stores.writes", "perdure.stores.results")

# Importer, imported, reason.
FORBIDDEN = [
    ("perdure.queues", "perdure.execution", "plans are pure functions; the execution layer calls them"),
    ("perdure.queues", "perdure.clock", "plans get the time as an argument"),
    ("perdure.cli", "perdure.stores", "the outer layer uses the client, never a store"),
    ("perdure.runner", "perdure.clock", "the runner gets the time with its inputs"),
]


def test_imports_point_down():
    faults = list(layer_faults(package_modules()))
    assert not faults, "\n".join(faults)


def test_no_package_imports_what_it_must_not_know():
    faults = list(knowledge_faults(package_modules()))
    assert not faults, "\n".join(faults)


def test_no_cycles():
    assert cycle(package_modules()) is None


def layer_faults(modules: Mapping[str, Module]) -> Iterator[str]:
    for module in _inside(modules):
        layer = layer_of(module.name)
        if layer is None:
            yield f"{module.name} has no layer; give it one in LAYERS, or move it into a package that has one"
            continue
        for target in imported(module, modules):
            target_layer = layer_of(target)
            if target_layer is not None and target_layer > layer:
                yield f"{module.name} (layer {layer}) imports {target} (layer {target_layer})"


def knowledge_faults(modules: Mapping[str, Module]) -> Iterator[str]:
    for module in _inside(modules):
        for target in imported(module, modules):
            if target == "perdure":
                yield f"{module.name} imports perdure itself; import from the module that defines the name"
            if within(target, "perdure.testing") and not within(module.name, "perdure.testing"):
                yield f"{module.name} imports {target}; nothing in the package imports testing"
            for who, whom, why in FORBIDDEN:
                if within(module.name, who) and within(target, whom):
                    yield f"{module.name} imports {target}: {why}"
            for group in BLIND:
                mine, theirs = _package_in(module.name, group), _package_in(target, group)
                if mine and theirs and mine != theirs and target not in STORE_INTERFACE:
                    yield f"{module.name} imports {target}: they must not know each other"


def cycle(modules: Mapping[str, Module]) -> str | None:
    """A cycle of imports, as `a -> b -> a`, or None."""
    graph = {module.name: imported(module, modules) for module in modules.values()}
    for module in _inside(modules):
        # To import `a.b.c` runs `a.b` first: a dependency of every module outside `a.b`.
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
    package = _package_in(name, LAYERS)
    return LAYERS[package] if package else None


def imported(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """The modules of the package that this one names in an import, executed or not."""
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


def _package_in(name: str, packages: Iterable[str]) -> str | None:
    return max((package for package in packages if within(name, package)), key=len, default=None)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


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
        "import perdure.engine",
        "from perdure import engine",
        "from perdure.engine import Engine",
        "from .. import engine",
        "from ..engine import Engine",
        "def later():\n    from perdure.engine import Engine",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from perdure.engine import Engine",
        "import importlib\nimportlib.import_module('perdure.engine')",
    ],
)
def test_upward_import_is_found(package, statement):
    modules = package({"model/records.py": statement, "engine.py": ""})
    assert list(layer_faults(modules)) == ["perdure.model.records (layer 1) imports perdure.engine (layer 5)"]


def test_relative_imports_are_resolved_in_packages_too(package):
    modules = package(
        {"runner/__init__.py": "from ..engine import x", "runner/tasks.py": "from ..engine import x", "engine.py": ""}
    )
    assert len(list(layer_faults(modules))) == 2


def test_module_without_layer_is_found(package):
    assert "perdure.stray has no layer" in next(layer_faults(package({"stray.py": ""})))


def test_stores_package_imports_only_the_protocol(package):
    files = {
        "stores/__init__.py": "from perdure.stores.memory.store import x",
        "stores/memory/store.py": "",
        "stores/protocol.py": "",
    }
    assert list(layer_faults(package(files))) == [
        "perdure.stores (layer 3) imports perdure.stores.memory.store (layer 4)"
    ]


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("execution/committer.py", "stores/sqlite/store.py", False),
        ("execution/committer.py", "stores/protocol.py", True),
        ("execution/committer.py", "cluster/shard_assignment.py", False),
        ("execution/committer.py", "execution/step_executor.py", True),
        ("cluster/membership.py", "execution/step_executor.py", False),
        ("stores/sqlite/batch.py", "execution/step_executor.py", False),
        ("stores/sqlite/batch.py", "stores/memory/store.py", False),
        ("stores/sqlite/batch.py", "stores/sqlite/schema.py", True),
        ("stores/sqlite/batch.py", "stores/paging.py", True),
        ("client/store_urls.py", "stores/sqlite/store.py", True),
        ("cli/app.py", "stores/sqlite/store.py", False),
        ("testing/contract/inbox.py", "stores/protocol.py", True),
        ("worker.py", "testing/clock.py", False),
        ("testing/engine.py", "testing/clock.py", True),
        ("runner/event_loop.py", "clock.py", False),
        ("client/client.py", "__init__.py", False),
    ],
)
def test_forbidden_imports_are_found(package, importer, imported, allowed):
    target = "perdure." + imported.removesuffix(".py").replace("/", ".")
    modules = package({imported: "", importer: f"import {target.removesuffix('.__init__')}"})
    assert (list(knowledge_faults(modules)) == []) is allowed


def test_cycle_is_found_and_named(package):
    modules = package(
        {
            "engine.py": "import perdure.worker",
            "worker.py": "def f():\n    import perdure.client.session",
            "client/session.py": "import perdure.engine",
        }
    )
    found = cycle(modules)
    assert found is not None
    names = found.split(" -> ")
    assert names[0] == names[-1]
    assert set(names) == {"perdure.engine", "perdure.worker", "perdure.client.session"}


def test_cycle_through_an_imported_package_is_found(package):
    modules = package(
        {
            "runner/__init__.py": "from perdure.runner.event_loop import Loop",
            "runner/event_loop.py": "from perdure.workflows.context import Context",
            "runner/scopes.py": "",
            "workflows/__init__.py": "",
            "workflows/context.py": "import perdure.runner.scopes",
        }
    )
    assert cycle(modules) is not None


def test_package_that_reexports_its_own_modules_is_no_cycle(package):
    modules = package(
        {
            "runner/__init__.py": "from perdure.runner.event_loop import Loop",
            "runner/event_loop.py": "from perdure.runner.scopes import x",
            "runner/scopes.py": "",
        }
    )
    assert cycle(modules) is None
