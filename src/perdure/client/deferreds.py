"""DeferredClient: complete deferreds from outside of their run, and the tokens and signing keys for that."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.client.session import ClientSession
from perdure.codec.failures import error_to_record_lossy
from perdure.errors import InvalidArgument, InvalidPayload, InvalidToken
from perdure.model.ids import deferred_message_id, fallback_message_id, incarnation_of
from perdure.model.records import Message, RunResult, RunStatus, SigningKey
from perdure.model.validation import check_name, describe_value
from perdure.stores.results import MessageDelivered, RunMissing
from perdure.workflows.deferreds import DECLARED_TYPES, find_mismatch
from perdure.workflows.tokens import (
    KEY_ACTIVATION_DELAY_SECONDS,
    KEYS,
    bind_epoch,
    is_of_another_run,
    make_token,
    read_token,
)

MAX_FALLBACKS = 100


class DeferredClient:
    """The calls `complete`, `fail`, `deferred_token` and `rotate_keys` of a client; `Client` documents them."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def complete(self, token: str, value: Any) -> bool:
        result = RunResult(result=self._session.codec.encode(value, what="the value of a deferred"))
        return await self._complete(token, result)

    async def fail(self, token: str, error: BaseException | str) -> bool:
        if isinstance(error, str):
            error = Exception(error)
        elif not isinstance(error, BaseException):
            raise InvalidArgument(f"a deferred fails with an exception or a text, not with {describe_value(error)}")
        record = error_to_record_lossy(error, self._session.codec)
        return await self._complete(token, RunResult(RunStatus.FAILED, error=record))

    async def deferred_token(self, run_id: str, name: str) -> str:
        name = check_name("a deferred's name", name)
        record = await self._session.get_run(run_id)
        first_executed_at = record.created_at if record.first_executed_at is None else record.first_executed_at
        epoch = bind_epoch(record.epoch, incarnation_of(record.created_by))
        return make_token(await self._keys(), record.id, epoch, name, at=first_executed_at)

    async def rotate_keys(self) -> None:
        session = self._session
        active_at = session.clock.now() + KEY_ACTIVATION_DELAY_SECONDS
        await self._keys()  # creates the first key if there is none: it signs until the new key is active
        await session.read(lambda: session.store.add_key(KEYS, active_at))

    async def _keys(self) -> list[SigningKey]:
        session = self._session
        now = session.clock.now()
        return await session.read(lambda: session.store.keys(KEYS, now))

    async def _complete(self, token: str, result: RunResult) -> bool:
        session = self._session
        keys = await self._keys()
        run_id, epoch, name = read_token(keys, token)
        record = await session.find_run(run_id)
        if record is None:
            raise InvalidToken(f"the token belongs to run {run_id!r}, which does not exist; it may have been pruned")
        incarnation = incarnation_of(record.created_by)
        if is_of_another_run(epoch, incarnation):
            raise InvalidToken(f"the token belongs to an earlier run with the id {run_id!r}, which has been deleted")
        bound_epoch = bind_epoch(record.epoch, incarnation)
        if epoch not in (record.epoch, bound_epoch) or record.status.terminal:
            return False
        kinds = DECLARED_TYPES.find(keys, run_id, bound_epoch, name)
        mismatch = self._mismatch(result, name, kinds)
        if mismatch is not None:
            raise mismatch
        message = Message(
            id=deferred_message_id(record.epoch, name),
            kind="deferred",
            name=name,
            body=msgspec.json.encode(result),
            sent_at=session.clock.now(),
        )
        first = None
        while True:
            delivered = await session.deliver(run_id, message)
            if isinstance(delivered, RunMissing):
                raise InvalidToken(f"the token belongs to run {run_id!r}, which has been pruned")
            if not isinstance(delivered, MessageDelivered) or delivered.fresh:
                return isinstance(delivered, MessageDelivered)
            if delivered.number == first:
                return False  # not unread, and not rejected since: the deferred has this value
            first = delivered.number
            queued = await self._queue_behind(run_id, record.epoch, message, kinds)
            if queued is not None:
                return queued

    async def _queue_behind(self, run_id: str, epoch: int, message: Message, kinds: tuple[Any, ...]) -> bool | None:
        """Store a later completion too, while the run has not checked the first one. It counts if that one fails.

        Returns whether it has become the first one because the run has rejected those before it in the meantime. None
        if no completion is unread.
        """
        session = self._session
        inbox = await session.read(lambda: session.store.inbox(run_id))
        unread = [each for each in inbox if each.kind == "deferred" and each.name == message.name]
        results = [msgspec.json.decode(each.body or b"{}", type=RunResult) for each in unread]
        if not unread:
            return None
        if len(unread) > MAX_FALLBACKS or any(each.body == message.body for each in unread):
            return False
        if any(each.result is None or (kinds and not self._mismatch(each, message.name, kinds)) for each in results):
            return False  # a failure always fits
        fallback = replace(message, id=fallback_message_id(epoch, message.name, message.body or b""))
        # The fallback goes first: a run that has rejected all others meanwhile finds it, or the completion itself.
        _, first = await asyncio.gather(session.deliver(run_id, fallback), session.deliver(run_id, message))
        return isinstance(first, MessageDelivered) and first.fresh

    def _mismatch(self, result: RunResult, name: str, kinds: tuple[Any, ...]) -> InvalidPayload | None:
        return None if result.result is None else find_mismatch(self._session.codec, result.result, name, kinds)
