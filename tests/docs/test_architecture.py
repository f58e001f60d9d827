"""docs/architecture.md names functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FUNCTIONS = sorted(set(re.findall(r"`([a-z_/]+\.py):([a-z_]+)`", PAGE)))


def test_page_names_functions():
    assert len(FUNCTIONS) > 40


@pytest.mark.parametrize(("module", "function"), FUNCTIONS)
def test_function_exists(module: str, function: str) -> None:
    tree = ast.parse((ROOT / "src" / "perdure" / module).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert function in names


@pytest.mark.parametrize("module", sorted(set(re.findall(r"`([a-z_]+/[a-z_/]+\.py)[`:]", PAGE))))
def test_module_exists(module: str) -> None:
    assert (ROOT / "src" / "perdure" / module).is_file() or (ROOT / module).is_file()
