"""The listener of the Redis store, without a server."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError, NoPermissionError

from perdure.stores.change_listeners import ChangeListeners
from perdure.stores.redis import listener as redis_hints
from perdure.stores.redis.listener import ChangePublisher, Listener, SubscriberConnection

ME = ChangePublisher("channel", "channel:name", "name")


class Deaf(Listener):
    """One whose first cancellation is lost on the way, as in a client library that takes it for a time-out."""

    asked = 0

    async def _follow(self, client: Any) -> None:
        while True:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.asked += 1
                if self.asked > 1:
                    raise


class NoServer:
    def build_single_client(self) -> Any:
        return self

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("begun", [False, True])
def test_stopping_ends_a_listener_that_did_not_hear_the_first_time(begun):
    async def main() -> None:
        server: Any = NoServer()
        listener = Deaf(server, ChangeListeners())
        starting = asyncio.create_task(listener.start(ME))
        for _ in range(2 if begun else 1):  # what is started begins to listen a moment later
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await listener.stop()
        assert listener.asked == (2 if begun else 0)
        starting.cancel()

    asyncio.run(main())


class Refused(Listener):
    async def _follow(self, client: Any) -> None:
        raise NoPermissionError("you may not")


@pytest.mark.parametrize("kind", [Refused, Deaf])
def test_a_store_that_cannot_hear_is_opened_all_the_same(kind: type[Listener], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hints only make things faster: whether the channel is refused, or nothing comes of it, is no reason to wait."""
    monkeypatch.setattr(redis_hints, "SUBSCRIBE_TIMEOUT_SECONDS", 0.05 if kind is Deaf else 60.0)

    async def main() -> None:
        server: Any = NoServer()
        listener = kind(server, ChangeListeners())
        try:
            async with asyncio.timeout(10):
                await listener.start(ME)
        finally:
            await listener.stop()

    asyncio.run(main())


def test_only_what_is_published_is_heard():
    async def main() -> None:
        heard: list[bytes] = []
        nothing: Any = None
        ear = SubscriberConnection(nothing, nothing, heard.append)
        ear.data_received(b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\nh")
        await ear.subscribed
        ear.data_received(b"i\r\n>2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n")
        ear.data_received(b"-NOPERM you may not listen to the second channel\r\n")
        ear.data_received(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\nho\r\n")
        assert heard == [b"hi", b"ho"]
        ear.connection_lost(None)
        with pytest.raises(ConnectionError, match="closed by the server"):
            await ear.lost

    asyncio.run(main())


def test_nobody_is_told_that_a_line_is_closed_that_nobody_listens_to():
    class Nothing:
        def abort(self) -> None: ...
        async def disconnect(self, nowait: bool) -> None: ...

    async def main() -> None:
        nothing: Any = Nothing()
        ear = SubscriberConnection(nothing, nothing, nothing)
        await ear.close()
        ear.connection_lost(None)
        assert ear.subscribed.cancelled()
        assert ear.lost.cancelled(), "an error that nobody asks for is logged"

    asyncio.run(main())


def test_who_is_not_let_in_is_told():
    async def main() -> None:
        nothing: Any = None
        ear = SubscriberConnection(nothing, nothing, nothing)
        ear.data_received(b"-NOPERM you may not\r\n")
        with pytest.raises(NoPermissionError):
            await ear.subscribed

    asyncio.run(main())
