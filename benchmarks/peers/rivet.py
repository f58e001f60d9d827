"""Rivet's workflow engine for Node, over a SQLite driver of ours: `rivet.mjs`, which this talks to over a pipe.

Questions and answers are lines of JSON. Times of single runs are taken on the other side, so that the pipe is not in
them.
"""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.peer_environments import PLACE
from benchmarks.peer_protocol import Adapter, Peer, Variant

PROGRAM = Path(__file__).with_suffix(".mjs")


class Rivet(Adapter):
    async def open(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            "node",
            *(str(PROGRAM), str(PLACE / "rivet"), str(self.setting.folder), self.variant or "plain"),
            stdin=pipe,
            stdout=pipe,
        )
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        self._process.kill()
        await self._process.wait()
        await self._reading

    async def execute(self, workflow: str, number: int) -> int:
        return int((await self._ask("execute", workflow=workflow, number=number))["value"])

    async def timed(self, workflow: str, number: int) -> float:
        if workflow == "children":
            raise NotImplementedError
        answer = await self._ask("execute", workflow=workflow, number=number)
        assert answer["value"] == number
        return float(answer["seconds"])

    async def start(self, workflow: str, number: int, id: str) -> None:
        await self._ask("start", workflow=workflow, number=number, id=id)

    async def result(self, id: str) -> int:
        return int((await self._ask("result", id=id))["value"])

    async def _ask(self, verb: str, **words: object) -> dict[str, Any]:
        question = next(self._numbers)
        self._asked[question] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"question": question, "verb": verb, **words}).encode() + b"\n")
        answer = await self._asked[question]
        if "error" in answer:
            raise RuntimeError(f"{verb}: {answer['error']}")
        return answer

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = json.loads(line)
            self._asked.pop(answer["question"]).set_result(answer)
        for asked in self._asked.values():
            asked.set_exception(RuntimeError("node is gone"))


_ALL = ("noop10", "latency", "recovery", "fanout")
PEER = Peer(
    title="Rivet workflow engine",
    adapter=Rivet,
    variants={
        "": Variant("SQLite", _ALL),
        "grouped": Variant("SQLite, grouped by our driver", _ALL, aside=True),
    },
    settings=(
        "over a SQLite driver of ours with synchronous=FULL, once with a transaction for each write, as its interface "
        "has it, and once with a group commit that we have added to it; no children"
    ),
    node=("@rivetkit/workflow-engine", "better-sqlite3"),
    embedded=True,
)
