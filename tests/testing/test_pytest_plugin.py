"""The pytest plugin in a pytest of its own: it works, it needs no other plugin, and costs nothing unless it is used."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))

WORKFLOW = """
from perdure import Context, step, workflow

@step
async def greet(name: str) -> str:
    return f"hello {name}"

@workflow
async def welcome(ctx: Context, name: str) -> str:
    await ctx.sleep(30 * 86_400)
    return await greet(name)
"""


def pytest_in(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (folder / "test_it.py").write_text(source)
    # As an installed perdure would be found: by its entry point, which a checkout does not have.
    installed = any(found.value == "perdure_pytest" for found in entry_points(group="pytest11"))
    by_hand = [] if installed else ["-p", "perdure_pytest"]  # a checkout that is not installed has no entry point
    command = [sys.executable, "-m", "pytest", "-q", *by_hand, "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": PATH}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_entry_point_is_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"perdure": "perdure_pytest"}
    assert "src/perdure_pytest" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert (ROOT / "src" / "perdure_pytest" / "__init__.py").exists()


def test_async_and_plain_tests_use_the_fixture(tmp_path):
    done = pytest_in(
        tmp_path,
        WORKFLOW
        + """
import asyncio
import pytest

@pytest.fixture
def greeted(perdure_engine):
    return perdure_engine.mock(greet, returns="mocked")

async def test_async(perdure_engine):
    assert await perdure_engine.execute(welcome, "ada") == "hello ada"

async def test_through_another_fixture(greeted, perdure_engine, tmp_path):
    assert await perdure_engine.execute(welcome, "ada") == "mocked"
    assert len(greeted.calls) == 1

def test_plain(perdure_engine):
    async def main():
        async with perdure_engine as engine:
            return await engine.execute(welcome, "bob")

    assert asyncio.run(main()) == "hello bob"

def test_test_engine_works_on_another_event_loop(perdure_engine):
    with asyncio.Runner() as runner:
        assert runner.run(perdure_engine.execute(welcome, "cy")) == "hello cy"

def test_unused(perdure_engine):
    pass

async def test_that_fails(perdure_engine):
    assert await perdure_engine.execute(welcome, "dan") == "hello"

class TestInAClass:
    async def test_method(self, perdure_engine):
        assert await perdure_engine.execute(welcome, "eve") == "hello eve"
""",
    )
    assert "6 passed" in done.stdout, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    assert "AssertionError: assert 'hello dan' == 'hello'" in done.stdout


def test_plugin_imports_perdure_only_when_the_fixture_is_used(tmp_path):
    done = pytest_in(
        tmp_path,
        """
import sys

def imported():
    return sorted(name for name in sys.modules if name.partition(".")[0] in ("perdure", "msgspec", "apsw"))

def test_before():
    assert "perdure_pytest" in sys.modules
    assert imported() == []

def test_using_it(perdure_engine):
    assert "perdure.testing.engine" in imported()
""",
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_other_async_tests_are_left_alone(tmp_path):
    done = pytest_in(tmp_path, "async def test_it():\n    pass\n")
    assert "async def functions are not natively supported" in done.stdout
