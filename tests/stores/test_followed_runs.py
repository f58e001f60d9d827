"""Messages between the followers of a run and its writer, without a transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from perdure.stores import followed_runs
from perdure.stores.followed_runs import FollowedRuns, PeerMessage, decode_message, encode_change_hint
from perdure.testing import VirtualClock

BYTES = 8_000


class Network:
    """Processes that receive each other's messages at once, or none while `is_cut`."""

    def __init__(self) -> None:
        self.processes: dict[str, FollowedRuns] = {}
        self.sent: list[PeerMessage] = []
        self.is_cut = False
        self.is_connected = True

    def add(self, name: str) -> FollowedRuns:
        added = FollowedRuns(name, lambda: self._deliver(added), lambda: self.is_connected)
        self.processes[name] = added
        added.join()
        return added

    def kill(self, name: str) -> None:
        self.processes.pop(name).close()

    def _deliver(self, sender: FollowedRuns) -> None:
        for data in sender.take_messages(BYTES):
            message = decode_message(data)
            assert message is not None
            self.sent.append(message)
            for process in [] if self.is_cut else list(self.processes.values()):
                process.on_message(message)

    def take(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return what was sent since the last call: sender, kind, run ids."""
        sent, self.sent = self.sent, []
        return [(each.sender, each.kind, tuple(sorted(each.run_ids or ()))) for each in sent]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    virtual = VirtualClock()
    monkeypatch.setattr(followed_runs, "SYSTEM_CLOCK", virtual)
    return virtual


@pytest.fixture
def network(clock: VirtualClock) -> Network:
    return Network()


def on_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def test_writer_notifies_only_about_runs_that_another_process_follows(network: Network) -> None:
    async def test() -> None:
        reader, writer = network.add("reader"), network.add("writer")
        calls: list[str] = []
        network.take()
        writer.on_committed(["r", "other"])
        assert network.take() == []
        assert not writer
        reader.follow("r", lambda: calls.append("r"))
        assert network.take() == [("reader", "follow", ("r",))]
        assert writer.is_followed_elsewhere("r")
        writer.on_committed(["r", "other", ("topic", "r")])
        assert network.take() == [("writer", "progress", ("r",))]
        assert calls == ["r"]

    on_loop(test)


def test_follower_in_the_writers_process_is_called_without_a_message(network: Network) -> None:
    async def test() -> None:
        network.is_connected = False
        both = network.add("both")
        network.take()
        calls: list[int] = []
        unfollow = both.follow("r", lambda: calls.append(1))
        both.on_committed(["r"])
        unfollow()
        both.on_committed(["r"])
        assert calls == [1]
        assert network.take() == []
        assert not both, "nothing is left of it"

    on_loop(test)


def test_follow_is_repeated_and_ends_with_the_next_repetition(network: Network, clock: VirtualClock) -> None:
    async def test() -> None:
        reader, writer = network.add("reader"), network.add("writer")
        unfollow = reader.follow("r", lambda: None)
        network.take()
        await clock.advance(followed_runs.REPEAT_SECONDS)
        assert network.take() == [("reader", "follow", ("r",))]
        unfollow()
        reader.follow("r", lambda: None)()
        assert network.take() == [], "a reader that follows again at once sends nothing"
        await clock.advance(followed_runs.REPEAT_SECONDS)
        assert network.take() == [("reader", "unfollow", ("r",))]
        assert not writer
        assert not reader
        await clock.advance(10 * followed_runs.REPEAT_SECONDS)
        assert network.take() == [], "no timer is left"

    on_loop(test)


def test_killed_follower_expires(network: Network, clock: VirtualClock) -> None:
    async def test() -> None:
        reader, writer = network.add("reader"), network.add("writer")
        reader.follow("r", lambda: None)
        network.kill("reader")
        network.take()
        await clock.advance(followed_runs.EXPIRE_SECONDS - 1)
        writer.on_committed(["r"])
        assert network.take() == [("writer", "progress", ("r",))]
        await clock.advance(2)
        writer.on_committed(["r"])
        assert network.take() == []
        assert not writer

    on_loop(test)


def test_expired_follow_of_a_run_without_commits_is_deleted(network: Network, clock: VirtualClock) -> None:
    async def test() -> None:
        reader, writer = network.add("reader"), network.add("writer")
        reader.follow("quiet", lambda: None)
        network.kill("reader")
        await clock.advance(followed_runs.EXPIRE_SECONDS + 1)
        network.add("third").follow("r", lambda: None)
        assert not writer.is_followed_elsewhere("quiet")
        assert writer.is_followed_elsewhere("r")

    on_loop(test)


def test_end_of_one_follower_leaves_the_other(network: Network, clock: VirtualClock) -> None:
    async def test() -> None:
        first, second, writer = network.add("first"), network.add("second"), network.add("writer")
        unfollow = first.follow("r", lambda: None)
        second.follow("r", lambda: None)
        unfollow()
        await clock.advance(followed_runs.REPEAT_SECONDS)
        assert writer.is_followed_elsewhere("r")

    on_loop(test)


def test_process_that_joins_later_learns_of_followers(network: Network) -> None:
    async def test() -> None:
        network.is_connected = False
        reader = network.add("reader")
        reader.follow("r", lambda: None)
        assert network.take() == [("reader", "join", ())], "there was no other process"
        network.is_connected = True
        writer = network.add("writer")
        assert writer.is_followed_elsewhere("r")

    on_loop(test)


def test_lost_follow_is_repaired_by_its_repetition(network: Network, clock: VirtualClock) -> None:
    async def test() -> None:
        reader, writer = network.add("reader"), network.add("writer")
        network.is_cut = True
        reader.follow("r", lambda: None)
        network.is_cut = False
        assert not writer
        await clock.advance(followed_runs.REPEAT_SECONDS)
        assert writer.is_followed_elsewhere("r")

    on_loop(test)


def test_messages_that_do_not_fit_are_split(network: Network) -> None:
    async def test() -> None:
        reader, writer = network.add("reader"), network.add("writer")
        ids = [f"{number:0400d}" for number in range(100)]
        for run_id in ids:
            reader.follow(run_id, lambda: None)
        network.take()
        writer.on_committed(ids)
        assert all(len(each.run_ids or ()) < 20 for each in network.sent)
        assert sorted(id for _, _, run_ids in network.take() for id in run_ids) == ids
        assert decode_message(encode_change_hint("a", frozenset(ids), BYTES)) == PeerMessage("a", "changed", None)
        assert list(reader.encode("follow", ("x" * BYTES,), BYTES)) == [], "one that can never fit is not sent"

    on_loop(test)


def test_callback_runs_on_the_loop_of_its_follower() -> None:
    """A store may be used by engines on several event loops."""
    followed = FollowedRuns("one")
    called_on: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        done = asyncio.Event()

        def callback() -> None:
            called_on.append(asyncio.get_running_loop())
            done.set()

        followed.follow("r", callback)
        await asyncio.to_thread(followed.on_committed, ["r"])
        await asyncio.wait_for(done.wait(), 10)
        assert called_on == [asyncio.get_running_loop()]

    asyncio.run(main())
    followed.on_committed(["r"])  # its loop is closed
    assert len(called_on) == 1


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'["a"]', b'["a","bark",[]]', b'["a","follow",[1]]', "[", b"{}"])
def test_message_of_another_version_is_ignored(data: bytes | str) -> None:
    assert decode_message(data) is None
