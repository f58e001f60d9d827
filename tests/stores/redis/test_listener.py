"""The listener of the Redis store, without a server."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import ConnectionError, NoPermissionError

from perdure.stores.change_listeners import ChangeListeners
from perdure.stores.redis import listener as redis_listener
from perdure.stores.redis.listener import ChangePublisher, Listener, SubscriberConnection

PUBLISHER = ChangePublisher("channel", "channel:name", "name")


class StubbornListener(Listener):
    """A listener that loses its first cancellation, like a client library that takes it for a timeout."""

    cancellations = 0

    async def _follow(self, client: Any) -> None:
        while True:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancellations += 1
                if self.cancellations > 1:
                    raise


class NoServer:
    def build_single_client(self) -> Any:
        return self

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("started", [False, True])
def test_stop_cancels_again_if_the_first_cancellation_is_lost(started):
    async def main() -> None:
        server: Any = NoServer()
        listener = StubbornListener(server, ChangeListeners())
        starting = asyncio.create_task(listener.start(PUBLISHER))
        for _ in range(2 if started else 1):  # a new task starts in the next iteration
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await listener.stop()
        assert listener.cancellations == (2 if started else 0)
        starting.cancel()

    asyncio.run(main())


class RefusedListener(Listener):
    async def _follow(self, client: Any) -> None:
        raise NoPermissionError("no permission")


@pytest.mark.parametrize("kind", [RefusedListener, StubbornListener])
def test_start_returns_if_the_subscription_fails_or_hangs(
    kind: type[Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hints only reduce latency: opening does not fail if the channel is refused, and does not wait if it is silent."""
    monkeypatch.setattr(redis_listener, "SUBSCRIBE_TIMEOUT_SECONDS", 0.05 if kind is StubbornListener else 60.0)

    async def main() -> None:
        server: Any = NoServer()
        listener = kind(server, ChangeListeners())
        try:
            async with asyncio.timeout(60):
                await listener.start(PUBLISHER)
        finally:
            await listener.stop()

    asyncio.run(main())


def test_subscriber_passes_on_published_messages_only():
    async def main() -> None:
        received: list[bytes] = []
        nothing: Any = None
        connection = SubscriberConnection(nothing, nothing, lambda channel, data: received.append(data))
        connection.data_received(b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\nh")
        await connection.subscribed
        connection.data_received(b"i\r\n>2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n")
        connection.data_received(b"-NOPERM you may not listen to the second channel\r\n")
        connection.data_received(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\nho\r\n")
        assert received == [b"hi", b"ho"]
        connection.connection_lost(None)
        with pytest.raises(ConnectionError, match="closed by the server"):
            await connection.lost

    asyncio.run(main())


def test_close_cancels_the_futures_of_a_subscriber():
    class Nothing:
        def abort(self) -> None: ...
        async def disconnect(self, nowait: bool) -> None: ...

    async def main() -> None:
        nothing: Any = Nothing()
        connection = SubscriberConnection(nothing, nothing, nothing)
        await connection.close()
        connection.connection_lost(None)
        assert connection.subscribed.cancelled()
        assert connection.lost.cancelled(), "an exception that is never retrieved would be logged"

    asyncio.run(main())


def test_refused_subscription_fails_with_the_error_of_the_server():
    async def main() -> None:
        nothing: Any = None
        connection = SubscriberConnection(nothing, nothing, nothing)
        connection.data_received(b"-NOPERM you may not\r\n")
        with pytest.raises(NoPermissionError):
            await connection.subscribed

    asyncio.run(main())
