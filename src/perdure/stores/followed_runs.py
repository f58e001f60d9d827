"""FollowedRuns: a reader follows a run that executes in another process, and that process notifies the reader.

A reader of a stream, of a reply or of a history waits for every commit to one run. Change hints go to all processes and
make workers claim, so stores send none for a step or an output. Instead, the processes of a store exchange messages:

    follow      the sender follows these runs (also repeated, see 4)
    unfollow    the sender follows these runs no longer
    progress    these runs were committed to; sent only for runs that another process follows
    join        the sender has started to listen; all processes repeat what they follow

Invariants:

1. Correctness never depends on a message. A reader reads the store after each notification, and polls in any case. A
   lost, late, doubled or forged message costs time only.
2. While no reader follows, a commit costs one check of two empty dictionaries, and nothing is sent.
3. A reader follows before it reads. So a commit after the arrival of `follow` is notified, and a commit before it is
   read, or is found by the first poll (after 20 ms).
4. A follower repeats `follow` every `REPEAT_SECONDS`. A process drops it `EXPIRE_SECONDS` after the last one, so that
   a killed follower causes no messages for longer than that.
5. A callback runs on the event loop on which it was added.

A store brings the transport: `wake_sender` is called when there are messages to take, `is_connected` returns whether
another process may listen. This module knows no store.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec
from msgspec import Struct

from perdure.clock import SYSTEM_CLOCK, Timer
from perdure.model.records import ProgressCallback
from perdure.stores.change_listeners import running_loop

REPEAT_SECONDS = 5.0
EXPIRE_SECONDS = 15.0

Kind = Literal["follow", "unfollow", "progress", "join", "changed"]  # "changed" is a change hint (SQLite)


class PeerMessage(Struct, frozen=True, array_like=True):
    """A message to the other processes of a store. `run_ids` is None in a change hint about any run."""

    sender: str
    kind: Kind
    run_ids: tuple[str, ...] | None = ()


_decode = msgspec.json.Decoder(PeerMessage).decode


def decode_message(data: bytes | str) -> PeerMessage | None:
    """Return the message; None if it is not one, as from another version."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeError):
        return _decode(data)
    return None


def encode_change_hint(sender: str, run_ids: frozenset[str], max_bytes: int) -> bytes:
    """Return a change hint about these runs; about any run if they do not fit."""
    encoded = msgspec.json.encode(PeerMessage(sender, "changed", tuple(run_ids)))
    return encoded if len(encoded) <= max_bytes else msgspec.json.encode(PeerMessage(sender, "changed", None))


class FollowedRuns:
    """The runs that this process follows, and those of this store that other processes follow."""

    def __init__(
        self,
        sender: str,
        wake_sender: Callable[[], None] = lambda: None,
        is_connected: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sender = sender
        self._wake_sender = wake_sender
        self._is_connected = is_connected
        self._followed_here: dict[str, dict[object, tuple[asyncio.AbstractEventLoop, ProgressCallback]]] = {}
        self._followers: dict[str, dict[str, float]] = {}  # run -> other process -> when its follow expires
        self._expire_at = 0.0  # when all expired follows are deleted next
        self._outbox: dict[Kind, set[str]] = {}
        self._repeat_timer: Timer | None = None
        self._repeat_loop: asyncio.AbstractEventLoop | None = None

    def __bool__(self) -> bool:
        """Return whether any process, this one included, follows a run."""
        return bool(self._followers or self._followed_here)

    def is_followed_elsewhere(self, run_id: str) -> bool:
        """Return whether another process follows the run."""
        return run_id in self._followers

    # --- the reader's process

    def follow(self, run_id: str, callback: ProgressCallback) -> Callable[[], None]:
        """Call `callback` after commits to the run. Return a function that ends this; calling it twice does no harm.

        Other processes learn of the end with the next repetition: most readers follow again at once.
        """
        key = object()
        is_new = run_id not in self._followed_here
        self._followed_here.setdefault(run_id, {})[key] = (asyncio.get_running_loop(), callback)
        if is_new and self._is_connected():
            self._send("follow", (run_id,))
            self._start_repeating()

        def unfollow() -> None:
            callbacks = self._followed_here.get(run_id, {})
            callbacks.pop(key, None)
            if not callbacks and not self._is_repeating():
                self._followed_here.pop(run_id, None)

        return unfollow

    def join(self) -> None:
        """Announce that this process listens, and what it follows: the connection is new."""
        self._outbox.setdefault("join", set())
        self._wake_sender()
        self.announce()

    def announce(self) -> None:
        """Repeat all that this process follows: another process has started to listen, or the connection is new."""
        if self._followed_here:
            self._send("follow", self._followed_here)
            self._start_repeating()

    def _start_repeating(self) -> None:
        if not self._is_repeating():
            self._repeat_loop = asyncio.get_running_loop()
            self._repeat_timer = SYSTEM_CLOCK.call_at(SYSTEM_CLOCK.now() + REPEAT_SECONDS, self._repeat)

    def _is_repeating(self) -> bool:
        return self._repeat_timer is not None and self._repeat_loop is not None and not self._repeat_loop.is_closed()

    def _repeat(self) -> None:
        """Repeat `follow` for runs with a reader, and unfollow the others."""
        self._repeat_timer = None
        unread = [run_id for run_id, callbacks in self._followed_here.items() if not callbacks]
        for run_id in unread:
            del self._followed_here[run_id]
        self._send("unfollow", unread)
        self.announce()

    def close(self) -> None:
        """Stop repeating. What other processes follow is deleted with the connection."""
        if self._repeat_timer is not None:
            self._repeat_timer.cancel()
            self._repeat_timer = None
        self._followers.clear()
        self._outbox.clear()

    # --- the writer's process

    def on_committed(self, run_ids: Iterable[object]) -> None:
        """Notify the followers of these runs. Call it after a commit, if any process follows."""
        now = SYSTEM_CLOCK.now()
        progressed = {run_id for run_id in run_ids if isinstance(run_id, str)}
        self._call_back(progressed)
        self._send("progress", [run_id for run_id in progressed if self._has_follower(run_id, now)])

    def _has_follower(self, run_id: str, now: float) -> bool:
        """Return whether another process follows the run. Delete its follows if all have expired."""
        followers = self._followers.get(run_id)
        if followers is None:
            return False
        if max(followers.values(), default=0.0) >= now:
            return True
        del self._followers[run_id]
        return False

    # --- messages

    def on_message(self, message: PeerMessage) -> None:
        """Handle a message of another process; ignore one of this process."""
        if message.sender == self._sender or message.run_ids is None:
            return
        match message.kind:
            case "follow":
                self._add_follower(message.sender, message.run_ids)
            case "unfollow":
                for run_id in message.run_ids:
                    self._remove_follower(run_id, message.sender)
            case "progress":
                self._call_back(message.run_ids)
            case "join":
                self.announce()
            case "changed":
                pass

    def take_messages(self, max_bytes: int) -> list[bytes]:
        """Return the messages to send, each of at most `max_bytes`, and empty the outbox."""
        outbox, self._outbox = self._outbox, {}
        return [each for kind, ids in outbox.items() for each in self.encode(kind, tuple(ids), max_bytes)]

    def encode(self, kind: Kind, run_ids: tuple[str, ...], max_bytes: int) -> Iterator[bytes]:
        """Yield messages with these runs, each of at most `max_bytes`."""
        encoded = msgspec.json.encode(PeerMessage(self._sender, kind, run_ids))
        if len(encoded) <= max_bytes:
            yield encoded
        elif len(run_ids) > 1:
            middle = len(run_ids) // 2
            yield from self.encode(kind, run_ids[:middle], max_bytes)
            yield from self.encode(kind, run_ids[middle:], max_bytes)

    def _send(self, kind: Kind, run_ids: Iterable[str]) -> None:
        ids = set(run_ids)
        if ids:
            self._outbox.setdefault(kind, set()).update(ids)
            self._wake_sender()

    def _add_follower(self, sender: str, run_ids: Iterable[str]) -> None:
        now = SYSTEM_CLOCK.now()
        if now >= self._expire_at:
            self._expire_at = now + EXPIRE_SECONDS
            for run_id in list(self._followers):
                self._has_follower(run_id, now)
        for run_id in run_ids:
            self._followers.setdefault(run_id, {})[sender] = now + EXPIRE_SECONDS

    def _remove_follower(self, run_id: str, sender: str) -> None:
        followers = self._followers.get(run_id, {})
        followers.pop(sender, None)
        if not followers:
            self._followers.pop(run_id, None)

    def _call_back(self, run_ids: Iterable[str]) -> None:
        current = running_loop()
        for run_id in run_ids:
            for loop, callback in list(self._followed_here.get(run_id, {}).values()):
                if loop is current:
                    callback()
                else:
                    with contextlib.suppress(RuntimeError):  # the follower's loop is closed
                        loop.call_soon_threadsafe(callback)
