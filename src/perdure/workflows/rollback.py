"""ctx.rollback_scope: a block that undoes what was done in it when it raises.

What was registered outside of it stays registered. Tasks that are opened inside belong to the block.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Protocol, Self

ROLLBACK_SCOPES: ContextVar[tuple[str, ...]] = ContextVar("perdure_rollback_scopes", default=())
"""The rollback scopes around the code that is running, outermost first."""


class RollbackHost(Protocol):
    """What a rollback scope asks of the run."""

    def place(self, segment: str) -> str: ...

    def roll_back(self, block: str) -> Awaitable[None]: ...


class RollbackScope:
    """`async with` it once."""

    def __init__(self, run: RollbackHost) -> None:
        self._run = run
        self._name = ""
        self._outer: Token[tuple[str, ...]] | None = None

    async def __aenter__(self) -> Self:
        self._name = self._run.place("~rollback_scope")
        self._outer = ROLLBACK_SCOPES.set((*ROLLBACK_SCOPES.get(), self._name))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._outer is not None
        ROLLBACK_SCOPES.reset(self._outer)
        if error is not None and not isinstance(error, GeneratorExit):
            await self._run.roll_back(self._name)
