"""Names of classes and modules: one meaning per name, and no module that hides a public name."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.tidy.sources import PACKAGE, Module, package_modules, read_modules

# `perdure.sync` offers blocking counterparts of public classes under the same names.
EXCEPTED_MODULES = {"perdure.sync"}

# Importing such a submodule would set an attribute of `perdure` that hides the public function of that name.
PUBLIC_FUNCTIONS = {"workflow", "step", "event", "run"}


def test_class_names_are_unique():
    duplicates = duplicate_classes(package_modules().values())
    assert duplicates == {}


def test_no_top_level_module_is_named_like_a_public_function():
    names = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert names & PUBLIC_FUNCTIONS == set()


def duplicate_classes(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Return the modules of each class name that is defined more than once, private and nested classes included."""
    places = defaultdict(list)
    for module in modules:
        if module.name not in EXCEPTED_MODULES:
            for name in class_names(module.tree):
                places[name].append(module.name)
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


def class_names(tree: ast.Module) -> Iterator[str]:
    return (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("class Row: ...", "class Row: ...", {"Row": ["perdure.first", "perdure.second"]}),
        ("class _Row: ...", "class _Row: ...", {"_Row": ["perdure.first", "perdure.second"]}),
        ("class A:\n    class Row: ...", "class Row: ...", {"Row": ["perdure.first", "perdure.second"]}),
        ("class Row: ...\nclass Row: ...", "", {"Row": ["perdure.first", "perdure.first"]}),
        ("class Row: ...", "class _Row: ...", {}),
        ("class Row: ...", "from perdure.first import Row", {}),
    ],
)
def test_what_counts_as_a_duplicate_class(tmp_path: Path, first: str, second: str, found: dict[str, list[str]]):
    package = tmp_path / "perdure"
    package.mkdir()
    for name, source in (("first", first), ("second", second), ("sync", "class Row: ...")):
        (package / f"{name}.py").write_text(source)
    assert duplicate_classes(read_modules(package).values()) == found
