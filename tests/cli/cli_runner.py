"""A folder with an application and a store, in which tests run the real `perdure` program."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from perdure import Client
from perdure.cli.json_output import run_shape
from tests.servers import postgres, redis

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.02
TIMEOUT_SECONDS = 60.0  # no test waits that long on purpose
TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")

SHOP = """
from dataclasses import dataclass
from perdure import Context, event, step, workflow

@dataclass
class Order:
    id: str
    cents: int

@event(on_target_terminated="dead_letter")
class Approved:
    by: str

@step(retry=None)
async def charge(order: Order) -> str:
    if order.cents < 0:
        raise ValueError("nothing to charge")
    return f"receipt-{order.id}"

@step
async def ship(order: Order) -> str:
    return "parcel"

@workflow
async def checkout(ctx: Context, order: Order) -> str:
    receipt = await charge(order)
    await ctx.join(left=ship(order), right=ship(order))
    approval = await ctx.receive(Approved)
    return f"{receipt} approved by {approval.by}"

@workflow
async def review(ctx: Context, title: str, pages: int = 1) -> str:
    verdict = ctx.deferred("verdict", str)
    await ctx.publish("token", verdict.token)
    return f"{title}: {await verdict}"

@workflow(tags={"team": "night"})
async def naps(ctx: Context) -> None:
    await ctx.sleep(86_400)

workflows = [checkout, review, naps]
one = checkout
nothing = 42
"""


class Shop:
    """An application, a store and the `perdure` program."""

    def __init__(self, folder: Path, url: str = "sqlite:///shop.db?synchronous=off") -> None:
        self.folder = folder
        self.url = url
        (folder / "shop.py").write_text(SHOP)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS", "NO_COLOR")}
        return {**kept, "PYTHONPATH": path, "PERDURE_STORE": self.url, "PYTHONIOENCODING": "utf-8"}

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-W", "error", "-m", "perdure.cli", *args]

    def run(self, *args: str, code: int = 0, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and check its exit code."""
        done = subprocess.run(
            self.command(*args),
            cwd=self.folder,
            env={**self.environment, **environment},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert done.returncode == code, f"{args} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "\x1b" not in done.stdout + done.stderr, "no colours in a pipe"
        return done

    def json(self, *args: str, code: int = 0) -> Any:
        return json.loads(self.run(*args, "--json", code=code).stdout)

    def start(self, name: str, payload: str | None = None, *more: str) -> str:
        """Start a run and return its id."""
        given = [name] if payload is None else [name, payload]
        return self.run("start", *given, "--app", "shop", *more).stdout.strip()

    def until(self, run_id: str, *statuses: str) -> Any:
        """Wait until a run has one of these statuses; return it as `show --json` prints it."""

        async def wait(client: Client) -> Any:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while await client.status(run_id) not in statuses:
                assert time.monotonic() < deadline, await client.describe(run_id)
                await asyncio.sleep(POLL)
            return run_shape(await client.describe(run_id))

        return self.call(wait)

    def create_store(self) -> None:
        """Create the empty store."""

        async def only_open(client: Client) -> None:
            """Do nothing: opening the client creates the store."""

        self.call(only_open)

    def call(self, action: Callable[[Client], Awaitable[T]]) -> T:
        """Await `action` with a client in this process, which is faster than a command."""

        async def main() -> T:
            async with Client(self.url.replace("sqlite:///", f"sqlite:///{self.folder}/")) as client:
                return await action(client)

        return asyncio.run(main())

    @contextmanager
    def worker(self, target: str = "shop:workflows", *more: str) -> Iterator[subprocess.Popen[str]]:
        """Run a worker; stop it at the end."""
        process = self.popen("worker", target, *more)
        try:
            assert process.stdout is not None
            assert "orker" in process.stdout.readline()
            yield process
        finally:
            self.stop(process)

    def popen(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*args), cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True
        )

    def stop(self, process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
        if process.poll() is None:
            process.send_signal(number)
        code = process.wait(TIMEOUT_SECONDS)
        if process.stdout is not None:
            process.stdout.close()
        return code


def shape_of(value: Any) -> Any:
    """Return JSON in which values that differ from run to run are replaced by a word."""
    if isinstance(value, dict):
        return {name: _word(name, each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape_of(each) for each in value]
    return value


def _word(name: str, value: Any) -> Any:
    if isinstance(value, str):
        if TIME.match(value):
            return "TIME"
        if name in ("traceback", "owner", "host", "token", "next", "line"):
            return name.upper()
    if name in ("pid", "token") and isinstance(value, int):
        return name.upper()
    return shape_of(value)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """An application and an empty SQLite store."""
    shop = Shop(tmp_path)
    shop.create_store()
    return shop


@pytest.fixture(params=["sqlite", "postgres"])
def shop_anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """An application on SQLite and on PostgreSQL."""
    with _on(request.param, tmp_path) as shop:
        yield shop


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def shop_everywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """An application on every store that outlives a process."""
    with _on(request.param, tmp_path) as shop:
        yield shop


@contextmanager
def _on(kind: str, folder: Path) -> Iterator[Shop]:
    if kind == "postgres":
        with postgres.schema_of_its_own() as url:
            yield Shop(folder, url)
    elif kind == "redis":
        with redis.prefix_of_its_own(durability="relaxed") as url:
            yield Shop(folder, url)
    else:
        yield Shop(folder)
