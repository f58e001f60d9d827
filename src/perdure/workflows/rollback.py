"""ctx.rollback_scope: a block whose compensations run when it raises.

Compensations registered outside of the block stay registered. Tasks started inside belong to the block. This module
knows the run only as a `RollbackHost`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Protocol, Self

ROLLBACK_SCOPES: ContextVar[tuple[str, ...]] = ContextVar("perdure_rollback_scopes", default=())
"""The rollback scopes around the running code, outermost first."""


class RollbackHost(Protocol):
    """The run, as rollback scopes use it."""

    def locate(self, segment: str) -> str: ...

    def roll_back(self, scope: str) -> Awaitable[None]: ...


class RollbackScope:
    """Async context manager of one rollback scope. It can be entered once."""

    def __init__(self, run: RollbackHost) -> None:
        self._run = run
        self._name = ""
        self._outer: Token[tuple[str, ...]] | None = None

    async def __aenter__(self) -> Self:
        self._name = self._run.locate("~rollback_scope")
        self._outer = ROLLBACK_SCOPES.set((*ROLLBACK_SCOPES.get(), self._name))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._outer is not None
        ROLLBACK_SCOPES.reset(self._outer)
        if error is not None and not isinstance(error, GeneratorExit):
            await self._run.roll_back(self._name)
