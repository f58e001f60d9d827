"""Rivet's workflow engine for Node, over a SQLite driver of this project: `rivet.mjs`, controlled through a pipe.

Requests and responses are lines of JSON. Node measures the times of single runs, so that they do not include the pipe.
"""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.peer_environments import ENVIRONMENTS
from benchmarks.peer_protocol import Adapter, Peer, Variant

PROGRAM = Path(__file__).with_suffix(".mjs")


class Rivet(Adapter):
    async def open(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            "node",
            *(str(PROGRAM), str(ENVIRONMENTS / "rivet"), str(self.setting.folder), self.variant or "plain"),
            stdin=pipe,
            stdout=pipe,
        )
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reader

    async def execute(self, workflow: str, number: int) -> int:
        return int((await self._request("execute", workflow=workflow, number=number))["value"])

    async def timed(self, workflow: str, number: int) -> float:
        if workflow == "children":
            raise NotImplementedError
        response = await self._request("execute", workflow=workflow, number=number)
        assert response["value"] == number
        return float(response["seconds"])

    async def start(self, workflow: str, number: int, id: str) -> None:
        await self._request("start", workflow=workflow, number=number, id=id)

    async def result(self, id: str) -> int:
        return int((await self._request("result", id=id))["value"])

    async def _request(self, verb: str, **arguments: object) -> dict[str, Any]:
        request_id = next(self._numbers)
        self._pending[request_id] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"request_id": request_id, "verb": verb, **arguments}).encode() + b"\n")
        response = await self._pending[request_id]
        if "error" in response:
            raise RuntimeError(f"{verb}: {response['error']}")
        return response

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            response = json.loads(line)
            self._pending.pop(response["request_id"]).set_result(response)
        for future in self._pending.values():
            future.set_exception(RuntimeError("the node process exited"))


_ALL = ("noop10", "latency", "recovery", "fanout")
PEER = Peer(
    title="Rivet workflow engine",
    adapter=Rivet,
    variants={
        "": Variant("SQLite", _ALL),
        "grouped": Variant("SQLite, with added group commit", _ALL, has_no_target=True),
    },
    settings=(
        "over a SQLite driver of this project with synchronous=FULL, once with one transaction per write, as its "
        "interface requires, and once with an added group commit; no children"
    ),
    node=("@rivetkit/workflow-engine", "better-sqlite3"),
    embedded=True,
    unsupported={"queues": "the workflow engine has no queues"},
)
