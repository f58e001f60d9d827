"""A worker whose runs fail with typed errors, until SIGTERM: `declining_worker URL LOG [parents]`.

With `parents` it executes only the workflow that starts children; without, only the children.
"""

import asyncio
import sys
from decimal import Decimal

from perdure import ChildFailed, Context, EngineConfig, Worker, step, workflow


class Declined(Exception):
    def __init__(self, amount: Decimal, *, code: int) -> None:
        super().__init__(f"{amount} declined")
        self.amount = amount
        self.code = code


@step(retry=None, raises=Declined)
async def charge(amount: Decimal) -> str:
    raise Declined(amount, code=51)


@workflow(name="declining.pay", raises=Declined)
async def pay(ctx: Context, amount: Decimal) -> str:
    return await charge(amount)


@workflow(name="declining.order", raises=Declined)
async def order(ctx: Context, amount: Decimal) -> str:
    try:
        return await ctx.run_child(pay, amount)
    except ChildFailed as failed:
        raise failed.__cause__ or failed from None


if __name__ == "__main__":
    workflows = [order] if "parents" in sys.argv else [pay]
    asyncio.run(Worker(sys.argv[1], workflows, config=EngineConfig(grace=0.2)).run())
