"""`show` prints the fields of a typed error, and names those that could not be recorded."""

import asyncio
import io
import json
import threading

import pytest
from rich.console import Console

from perdure import Context, Engine, RunFailed, step, workflow
from perdure.cli.json_output import entry_shape, run_shape
from perdure.cli.timeline import draw_run


class Refused(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("refused")
        self.code = code
        self.lock = threading.Lock()


@step(retry=None, raises=Refused)
async def refuse() -> None:
    raise Refused(7)


@workflow(name="recorded.errors", raises=Refused)
async def refused(ctx: Context) -> None:
    await refuse()


def test_show_prints_fields_as_json_and_names_dropped_ones() -> None:
    async def main() -> None:
        async with Engine("memory://", [refused]) as engine:
            with pytest.raises(RunFailed):
                await engine.execute(refused, id="x")
            run, history = await engine.describe("x"), await engine.history("x")
        console = Console(file=io.StringIO(), width=120, record=True)
        console.print(draw_run(run, history, trace=False))
        assert "✗ Refused at refuse: refused\n  not recorded: lock\n" in console.export_text()
        shape = json.loads(json.dumps(entry_shape(history[0])))["error"]
        assert (shape["type"], shape["fields"], shape["dropped"]) == ("Refused", {"code": 7}, ["lock"])
        assert (run_shape(run)["error"] or {})["fields"] == {"code": 7}

    asyncio.run(main())
