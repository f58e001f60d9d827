"""The files that the tidy tests read, parsed once."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "perdure"

# What people write; everything else in a checkout is made by tools.
_WRITTEN_DIRS = ("src", "tests", "docs", "examples", "benchmarks", ".ci", ".github")


@dataclass(frozen=True)
class Module:
    name: str
    """Dotted, as it is imported: `perdure.stores.protocol`; a package's `__init__` has the package's name."""
    path: Path
    source: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@cache
def package_modules() -> dict[str, Module]:
    """Every module of perdure, by dotted name."""
    return read_modules(PACKAGE)


def read_modules(package: Path) -> dict[str, Module]:
    """Every module of the package in this folder, by dotted name."""
    modules = {}
    for path in python_files(package):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        source = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, source, ast.parse(source, filename=str(path)))
    return modules


def python_files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def written_files(root: Path = ROOT) -> Iterator[Path]:
    """Every file that someone wrote, at the top of the checkout and in the folders that belong to the project."""
    yield from sorted(path for path in root.iterdir() if path.is_file())
    for folder in _WRITTEN_DIRS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def dotted_names(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for: `from time import sleep as s` gives `{"s": "time.sleep"}`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def resolve(node: ast.expr, names: dict[str, str]) -> str | None:
    """The dotted path that an expression such as `dt.datetime.now` names, seen through the module's imports."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = resolve(node.value, names)
        return f"{base}.{node.attr}" if base else None
    return None
