"""The quick taste of the specification runs as it is written there."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TASTE = """\
from dataclasses import dataclass
from perdure import Context, Engine, Retry, event, step, workflow

@dataclass
class Order:
    id: str
    cents: int

@event
class Approved:
    by: str

@step(retry=Retry(max_attempts=5))
async def charge(order: Order) -> str:
    return f"receipt-{order.id}"

@workflow
async def checkout(ctx: Context, order: Order) -> str:
    approval = await ctx.receive(Approved, timeout=3600)
    receipt = await charge(order)          # durable: recorded once, replayed ever after
    await ctx.sleep(0.1)
    return f"{receipt} approved by {approval.by}"

async def main():
    async with Engine("sqlite:///shop.db") as engine:
        run = await engine.start(checkout, Order("42", 999), id="order-42")
        await engine.send("order-42", Approved("ada"))
        print(await run.result())
"""

RUN = "\nimport asyncio\nasyncio.run(main())\n"


def test_the_quick_taste_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "taste.py").write_text(TASTE + RUN, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "error", "taste.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("receipt-42 approved by ada\n", "")
    assert (tmp_path / "shop.db").exists()
