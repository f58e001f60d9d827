"""Restarts one run again and again, and prints the number of each call: `restart_caller URL LOG FIRST COUNT GATE`."""

import asyncio
import sys

from perdure import Client
from tests.crash.programs.restart_worker import Go, job


async def main(url: str, log: str, first: int, count: int, gate: str) -> None:
    async with Client(url) as client:
        for number in range(first, first + count):
            await client.start(job.options(id="job", if_exists="restart", send=[Go(number)]), log, number, gate)
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
