"""The lifespan of a command-line worker: named by an option or in pyproject.toml, and never by chance."""

import json
import signal

import pytest

from tests.cli.cli_runner import SHOP, TIMEOUT_SECONDS
from tests.cli.test_dev import lines_until

RESOURCES = """
from contextlib import asynccontextmanager

@asynccontextmanager
async def opened(worker):
    print("entered", flush=True)
    yield {"kind": type(worker).__name__}
    print("exited", flush=True)

@asynccontextmanager
async def broken(worker):
    raise ConnectionRefusedError("no database")
    yield
"""

READS = """
from perdure import current_step

@step
async def read() -> str:
    return str(current_step().state)

@workflow
async def reads(ctx: Context) -> str:
    return await read()

async def lifespan(app):  # of a web application: not used unless it is named
    raise AssertionError
    yield
"""


@pytest.fixture
def app(shop):
    (shop.folder / "shop.py").write_text(SHOP + READS)
    (shop.folder / "resources.py").write_text(RESOURCES)
    return shop


def run_worker(app, *args):
    """Run a worker until it has executed a run; return the result of the run and the worker's output."""
    worker = app.popen("worker", *args)
    seen = lines_until(worker, lambda line: "Worker started" in line)
    app.start("reads", None, "--id", "r")
    ended = app.until("r", "succeeded", "failed")
    worker.send_signal(signal.SIGTERM)
    seen += lines_until(worker, lambda line: "Worker stopped" in line)
    worker.stdout.close()
    assert worker.wait(TIMEOUT_SECONDS) == 0
    return ended["result"], [line.strip() for line in seen if line.strip() in ("entered", "exited")]


def test_option_names_the_lifespan_of_a_worker(app):
    assert run_worker(app, "shop.py", "--lifespan", "resources:opened") == (
        "{'kind': 'Worker'}",
        ["entered", "exited"],
    )


def test_pyproject_names_the_lifespan(app):
    (app.folder / "pyproject.toml").write_text('[tool.perdure]\napp = "shop"\nlifespan = "resources:opened"\n')
    assert run_worker(app)[1] == ["entered", "exited"]


def test_attribute_that_is_called_lifespan_is_not_used_by_itself(app):
    assert run_worker(app, "shop.py") == ("None", [])


def test_dev_passes_the_lifespan_to_its_worker(app):
    dev = app.popen("dev", "shop.py", "--lifespan", "resources:opened")
    try:
        lines_until(dev, lambda line: line.strip() == "entered")
    finally:
        assert app.stop(dev) == 0


@pytest.mark.parametrize(
    ("name", "message", "code"),
    [
        ("resources:missing", "resources has no missing", 2),
        ("missing", "shop has no missing", 2),
        ("lifespan", "must be an async context manager", 2),
        ("nowhere:opened", "there is no module nowhere", 2),
        ("resources:broken", "ConnectionRefusedError: no database", 1),
    ],
)
def test_lifespan_that_cannot_be_entered_is_reported(app, name, message, code):
    done = app.run("worker", "shop.py", "--lifespan", name, "--json", code=code)
    assert message in json.loads(done.stderr)["error"]["message"]
