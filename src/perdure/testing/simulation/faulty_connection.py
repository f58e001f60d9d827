"""FaultyConnection: the connection of one process to the store. Calls are delayed, fail or lose results, as planned."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from perdure.errors import StoreError
from perdure.model.records import ChangeCallback, ProgressCallback
from perdure.stores.protocol import Claim, Store
from perdure.stores.results import ClaimedRun, WriteResult
from perdure.stores.writes import Write
from perdure.testing.faults import FaultyStore
from perdure.testing.simulation.fault_plan import Fault, Plan
from perdure.testing.simulation.process import Process
from perdure.testing.simulation.randomness import seeded_random

T = TypeVar("T")
SLOW = 2.0  # seconds
DELAYS = (0.0, 0.0, 0.001, 0.002, 0.005, 0.02)  # seconds that a request or a response may take


class FaultyConnection(FaultyStore):
    """The store of one process. `seed` determines the delays of calls and change hints."""

    def __init__(self, store: Store, process: Process, plan: Plan, seed: object) -> None:
        super().__init__(store)
        self.process = process
        self.plan = plan
        self.healed = False
        self._seed = seed
        self._fails = 0
        self._hints_until = {"hints lost": 0.0, "hints doubled": 0.0, "hints late": 0.0}

    # --- calls

    async def _forward(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        process, n = self.process, self.process.count("calls")
        rng = zlib.crc32(f"{self._seed}/{process.name}/{n}".encode())
        fault = None if self.healed else self.plan.at_call(process.name, n)
        if fault is not None:
            process.trace(f"{fault} [{name}]")
        await process.awake()
        await self._travel(DELAYS[rng % len(DELAYS)] + (SLOW if fault is not None and fault.kind == "slow" else 0.0))
        self._fail_if_planned(name, fault)
        result = await call()
        await self._travel(DELAYS[rng // 97 % len(DELAYS)])
        if fault is not None and fault.kind == "result lost at a call":
            raise StoreError(f"the result was lost (planned, {name})", retryable=True)
        return result

    def _fail_if_planned(self, name: str, fault: Fault | None) -> None:
        if fault is not None and fault.kind == "error":
            self._fails = int(fault.amount)
        if self._fails and not self.healed:
            self._fails -= 1
            raise StoreError(f"the store is unavailable (planned, {name})", retryable=True)

    async def _travel(self, seconds: float) -> None:
        if seconds:
            await self.process.wait(seconds)
        await self.process.awake()

    async def claim(self, claim: Claim) -> list[ClaimedRun]:
        claimed = await super().claim(claim)
        if (
            claimed
            and not self.healed
            and (fault := self.plan.at_claim(self.process.name, self.process.count("claims")))
        ):
            self.process.trace(str(fault))
            raise StoreError("the result was lost (planned, claim)", retryable=True)
        return claimed

    async def commit(self, batch: Sequence[Write]) -> list[WriteResult]:
        n = self.process.count("commits")
        fault = None if self.healed else self.plan.at_commit(self.process.name, n)
        if fault is None:
            return await self._forward("commit", lambda: self.inner.commit(batch))
        self.process.trace(f"{fault}, of {len(batch)} writes")
        results = await self._forward("commit", lambda: self._commit_with(fault, batch))
        if fault.kind.startswith("dies"):
            self.process.die()
            await self.process.awake()
        elif "lost" in fault.kind:
            raise StoreError(f"the result was lost (planned, commit {n})", retryable=True)
        return results

    async def _commit_with(self, fault: Fault, batch: Sequence[Write]) -> list[WriteResult]:
        """Apply the batch, a part of it, or nothing. A partitioned store may apply a part: writes are independent."""
        if fault.kind == "dies before":
            return []
        part = fault.kind in ("dies within", "half done, result lost")
        return await self.inner.commit(batch[: len(batch) // 2] if part else batch)

    # --- change hints

    def disturb_hints(self, kind: str, seconds: float) -> None:
        """Lose, double or delay change hints for `seconds`."""
        self._hints_until[kind] = self.process.loop.current_time + seconds

    def on_change(self, callback: ChangeCallback) -> Callable[[], None]:
        return self._listen("hints", self.process.count("listeners"), callback, self.inner.on_change)

    def follow(self, run_id: str, callback: ProgressCallback) -> Callable[[], None]:
        return self._listen("progress", self.process.count("followers"), callback, partial(self.inner.follow, run_id))

    def _listen(
        self,
        kind: str,
        number: int,
        callback: Callable[..., None],
        subscribe: Callable[[Callable[..., None]], Callable[[], None]],
    ) -> Callable[[], None]:
        """Subscribe a callback whose calls are delayed, lost or doubled as planned."""
        process = self.process
        rng = seeded_random(self._seed, process.name, kind, number)
        listening = [True]

        def deliver(*given: object) -> None:
            if listening[0] and not process.dead.is_set():
                callback(*given)

        def on_hint(*given: object) -> None:
            now, until = process.loop.current_time, self._hints_until
            if process.frozen or until["hints lost"] > now:
                return
            delay = rng.choice((0.0, 0.001, 0.01)) + (rng.uniform(0.5, 3.0) if until["hints late"] > now else 0.0)
            for _ in range(2 if until["hints doubled"] > now else 1):
                process.loop.call_later(delay, deliver, *given)

        unsubscribe_inner = subscribe(on_hint)

        def unsubscribe() -> None:
            listening[0] = False
            unsubscribe_inner()

        return unsubscribe
