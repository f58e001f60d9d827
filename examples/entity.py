"""A bank account as one long-lived run: `python entity.py`.

The run owns the balance. Callers send requests to the id of the run and get replies. Requests are processed one after
the other, so no two of them see the same balance, and the account needs neither a lock nor a database of its own.

A run that lives for years must not collect years of history. After a number of requests it continues as new: the same
id, an empty history, and the balance as its input. Requests that arrive meanwhile stay in its mailbox.
"""

import asyncio
from dataclasses import dataclass

from perdure import Context, Engine, event, workflow

REQUESTS_PER_GENERATION = 3  # a realistic number is some thousands


@event
class Deposit:
    cents: int


@event
class Withdraw:
    cents: int


@event
class Close:
    pass


@dataclass
class Account:
    balance: int = 0


@workflow
async def account(ctx: Context, state: Account) -> int:
    for _ in range(REQUESTS_PER_GENERATION):
        request = await ctx.receive_request(Deposit, Withdraw, Close)
        match request.value:
            case Deposit(cents):
                state.balance += cents
                await request.reply(f"balance {state.balance}")
            case Withdraw(cents) if cents > state.balance:
                await request.reply(f"refused, balance {state.balance}")
            case Withdraw(cents):
                state.balance -= cents
                await request.reply(f"balance {state.balance}")
            case Close():
                await request.reply("closed")
                return state.balance
    await ctx.continue_as(state)
    raise AssertionError("continue_as does not return")


async def main() -> None:
    async with Engine("sqlite:///accounts.db") as engine:
        run = await engine.start(account, Account(), id="account-7")
        if not run.created:
            print(f"the account was closed with {await run.result()} cents")
            return
        for request in (Deposit(500), Withdraw(200), Withdraw(400), Deposit(50)):
            print(f"{request}: {await engine.request(run.id, request, timeout=30)}")
        print(f"generation {(await run.describe()).generation}")
        print(f"{Close()}: {await engine.request(run.id, Close(), timeout=30)}")
        print(f"the account was closed with {await run.result()} cents")


if __name__ == "__main__":
    asyncio.run(main())
