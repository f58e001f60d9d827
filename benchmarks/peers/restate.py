"""Restate: its server (from its npm package), and a service written with its Python SDK, served by hypercorn.

The service has its own process, as in a deployment. The server survives a crash of the service and of the caller.
`python -m benchmarks.peers.restate PORT FOLDER` runs the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.event_loop import use_uvloop_if_installed
from benchmarks.harness import Setting
from benchmarks.peer_environments import node_program_path
from benchmarks.peer_protocol import Adapter, Peer, Variant
from benchmarks.step_bodies import STEPS, Gate, noop

SERVER_START_TIMEOUT_SECONDS = 60.0
SERVICE = "bench"


@contextlib.contextmanager
def server(setting: Setting) -> Iterator[None]:
    """Run restate-server in its own folder, on free ports."""
    ports = {name: _free_port() for name in ("ingress", "admin", "node", "service")}
    (setting.folder / "ports").write_text(json.dumps(ports))
    environment = {
        **os.environ,
        "RESTATE_INGRESS__BIND_PORT": str(ports["ingress"]),
        "RESTATE_ADMIN__BIND_PORT": str(ports["admin"]),
        "RESTATE_BIND_PORT": str(ports["node"]),
        "RESTATE_BIND_IP": "127.0.0.1",
        "RESTATE_LISTEN_MODE": "tcp",
        "RESTATE_DISABLE_TELEMETRY": "true",
    }
    command = [
        str(node_program_path("restate", "restate-server")),
        "--no-logo",
        "--base-dir",
        str(setting.folder / "server"),
    ]
    with (setting.folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=setting.folder, start_new_session=True
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the program is a script that starts the server
        process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Restate(Adapter):
    async def open(self) -> None:
        aiohttp: Any = importlib.import_module("aiohttp")  # the SDK's own client is slower than the engine
        self._ports: dict[str, int] = json.loads((self.setting.folder / "ports").read_text())
        self._service = _start_service(self._ports["service"], self.setting.folder)
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._ingress = f"http://127.0.0.1:{self._ports['ingress']}/{SERVICE}"
        registered = self.setting.folder / "registered"
        if not registered.exists():  # a restarted service is registered already
            await self._register(aiohttp.ClientConnectionError)
            registered.touch()

    async def _register(self, connection_error: type[Exception]) -> None:
        """Register the service with the server, with retries until both respond."""
        deadline = monotonic() + SERVER_START_TIMEOUT_SECONDS
        admin = f"http://127.0.0.1:{self._ports['admin']}/deployments"
        service = {"uri": f"http://127.0.0.1:{self._ports['service']}", "force": True}
        while True:
            with contextlib.suppress(connection_error):
                async with self._client.post(admin, json=service) as response:
                    if response.status < 300:
                        return
            assert monotonic() < deadline, "restate-server did not accept the service"
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._client.close()
        self._service.kill()
        self._service.wait()

    async def execute(self, workflow: str, number: int) -> int:
        return int(await self._post(workflow, number))

    async def start(self, workflow: str, number: int, id: str) -> None:
        await self._post(f"{workflow}/send", number, id)

    async def result(self, id: str) -> int:
        """Return the result. Repeating a call with the same idempotency key waits for its result."""
        return int(await self._post("halfway", int(id.partition("-")[2]), id))

    async def _post(self, path: str, number: int, key: str | None = None) -> Any:
        headers = {"idempotency-key": key} if key else {}
        async with self._client.post(f"{self._ingress}/{path}", json=number, headers=headers) as response:
            response.raise_for_status()
            return await response.json()


# --- the service ---------------------------------------------------------------------------------------------------


def _start_service(port: int, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "benchmarks.peers.restate", str(port), str(folder)])


def serve(port: int, folder: Path) -> None:
    hypercorn: Any = importlib.import_module("hypercorn.asyncio")
    config: Any = importlib.import_module("hypercorn.config").Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.errorlog = None
    # The production settings of its documentation, but with one process, like every engine here.
    config.h2_max_concurrent_streams = config.keep_alive_max_requests = config.keep_alive_timeout = 2**31 - 1
    use_uvloop_if_installed()
    asyncio.run(hypercorn.serve(_app(Gate(folder)), config))


def _app(gate: Gate) -> Any:
    restate: Any = importlib.import_module("restate")
    service = restate.Service(SERVICE)

    async def one_step(ctx: Any, number: int) -> int:
        return int(await ctx.run_typed("task", noop, number=number))

    async def ten_steps(ctx: Any, number: int) -> int:
        for _ in range(STEPS):
            number = await ctx.run_typed("task", noop, number=number)
        return number

    async def halfway(ctx: Any, number: int) -> int:
        for _ in range(STEPS // 2):
            await ctx.run_typed("task", noop, number=number)
        await ctx.run_typed("stop", gate.stop, number=number)
        for _ in range(STEPS // 2):
            await ctx.run_typed("task", noop, number=number)
        return number

    child = service.handler()(one_step)

    async def children(ctx: Any, number: int) -> int:
        calls = [ctx.service_call(child, each) for each in range(number)]
        return len(await restate.gather(*calls))

    async def parallel(ctx: Any, number: int) -> int:
        return len(await restate.gather(*(ctx.run_typed("task", noop, number=each) for each in range(number))))

    for body in (ten_steps, halfway, children, parallel):
        service.handler()(body)
    return restate.app([service])


PEER = Peer(
    title="Restate",
    adapter=Restate,
    variants={"": Variant("", ("noop10", "latency", "recovery", "fanout"))},
    settings="one node with its defaults, one process of hypercorn; in `recovery` the server keeps running",
    python=("restate-sdk", "hypercorn", "aiohttp", "uvloop"),
    node=("@restatedev/restate-server",),
    external_process=server,
    unsupported={"queues": "a service has no limit of concurrency over all of its workers"},
)

if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
