"""Transfer money between two accounts, and refund it if the second half fails: `python money_transfer.py`.

The transfer is a saga: each step has a compensation that undoes it. If a later step fails for good, perdure executes
the compensations of the completed steps in reverse order, each as a durable step. A crash at any point continues where
the transfer was.

The bank is a SQLite file of its own. A step runs again if a crash comes before its result is recorded. So each booking
is stored under the step's idempotency key, and a second one with the same key changes nothing.
"""

import asyncio
import sqlite3
from dataclasses import dataclass

from perdure import Context, CriticalError, Engine, RunFailed, current_step, step, workflow

BANK = "bank.db"


@dataclass
class Transfer:
    source: str
    target: str
    cents: int


# --- steps: bookings -------------------------------------------------------------------------------------------------


def book(account: str, cents: int) -> str:
    """Add cents to an account, once per step. Return the id of the booking."""
    booking = current_step().idempotency_key
    with sqlite3.connect(BANK) as bank:
        closed = bank.execute("SELECT closed FROM accounts WHERE id = ?", (account,)).fetchone()[0]
        if closed and cents > 0:
            raise CriticalError(f"account {account!r} is closed")  # never retried
        bank.execute("INSERT OR IGNORE INTO bookings VALUES (?, ?, ?)", (booking, account, cents))
    print(f"  {account}: {cents:+d}")
    return booking


@step
def refund(withdrawal: str) -> None:
    """Compensate a withdrawal. It gets the result of the step that it undoes."""
    with sqlite3.connect(BANK) as bank:
        account, cents = bank.execute("SELECT account, cents FROM bookings WHERE id = ?", (withdrawal,)).fetchone()
    book(account, -cents)


@step(compensate=refund)
def withdraw(account: str, cents: int) -> str:
    return book(account, -cents)


@step
def deposit(account: str, cents: int) -> str:
    return book(account, cents)


# --- workflow --------------------------------------------------------------------------------------------------------


@workflow
async def transfer(ctx: Context, order: Transfer) -> str:
    await withdraw(order.source, order.cents)
    await deposit(order.target, order.cents)
    return f"{order.cents} cents from {order.source} to {order.target}"


# --- program ---------------------------------------------------------------------------------------------------------


def open_bank() -> None:
    with sqlite3.connect(BANK) as bank:
        bank.execute("CREATE TABLE IF NOT EXISTS accounts (id TEXT PRIMARY KEY, closed INTEGER)")
        bank.execute("CREATE TABLE IF NOT EXISTS bookings (id TEXT PRIMARY KEY, account TEXT, cents INTEGER)")
        bank.executemany(
            "INSERT OR IGNORE INTO accounts VALUES (?, ?)", [("alice", False), ("bob", False), ("carol", True)]
        )


def balances() -> dict[str, int]:
    with sqlite3.connect(BANK) as bank:
        return dict(bank.execute("SELECT account, sum(cents) FROM bookings GROUP BY account ORDER BY account"))


async def main() -> None:
    open_bank()
    async with Engine("sqlite:///transfers.db") as engine:
        for number, order in enumerate([Transfer("alice", "bob", 500), Transfer("alice", "carol", 300)]):
            try:
                print(await engine.execute(transfer.options(id=f"transfer-{number}"), order))
            except RunFailed as failed:
                print(f"failed: {failed.message}")
    print(balances())


if __name__ == "__main__":
    asyncio.run(main())
