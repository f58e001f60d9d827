"""PeerSockets: datagrams between the processes that have one file open.

Each open store has a Unix datagram socket in the directory `<file>-peers`. After a commit, a process sends a datagram
to each other socket there. Without it, other processes find the commit when they poll, on average after 10 ms.

Invariants:

1. Datagrams are change hints. A process that gets none finds all changes by polling and sweeps, only later.
2. Nothing here raises, and no send waits. There is no socket if the system has none (Windows), if the path is too long
   (108 bytes on Linux, 104 on macOS), or if another user owns the directory. A full receiver misses the datagram.
3. The directory has mode 0700 and a socket 0600: processes of other users neither send nor receive, and poll.
4. The name of a socket is random and used once. So a socket that refuses a datagram is that of a dead process, and is
   removed. A process removes its own socket when it closes the store or exits, and the directory with the last one.
5. A process that is the only one pays for no datagram: it sends to the sockets that it knows. It learns of another
   process by a datagram (each process sends one when it opens the store), or by listing the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import weakref
from collections.abc import Callable
from pathlib import Path

from perdure.clock import SYSTEM_CLOCK
from perdure.model.ids import new_token

LIST_INTERVAL_SECONDS = 5.0
MAX_DATAGRAM_BYTES = 8_000
DATAGRAMS_PER_CALLBACK = 64
BIND_ATTEMPTS = 5  # another process may remove the empty directory in between

_SOCKET_NAME = re.compile("[0-9a-f]{16}")  # other files in the directory are left alone

LOGGER = logging.getLogger("perdure.stores")


class PeerSockets:
    """The socket of one store object, open from `open` to `close`, and the names of the other sockets."""

    def __init__(self, path: str, on_datagram: Callable[[bytes], None]) -> None:
        self.name = new_token()[:16]
        self._folder = Path(f"{path}-peers")
        self._on_datagram = on_datagram
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._peers: set[str] = set()
        self._listed_at = 0.0
        self._pid = os.getpid()
        self._remove: Callable[[], object] = lambda: None

    def open(self) -> None:
        """Create the socket and receive on the running event loop. Does nothing if the system has no such sockets.

        On an open socket: move to the running loop if the former one is closed.
        """
        if self._socket is None:
            self._socket = self._create()
        if self._socket is not None and (self._loop is None or self._loop.is_closed()):
            try:
                loop = asyncio.get_running_loop()
                loop.add_reader(self._socket.fileno(), self._receive)
                self._loop = loop
            except (NotImplementedError, OSError, ValueError) as error:
                LOGGER.debug("Cannot receive datagrams of other processes, polling instead: %s", error)
                self.close()
        self.list_peers()

    def close(self) -> None:
        """Remove the socket. Idempotent."""
        if self._socket is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._socket = self._loop = None
        self._peers.clear()
        self._remove()

    def _create(self) -> socket.socket | None:
        if not hasattr(socket, "AF_UNIX"):
            return None
        try:
            created = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError as error:
            LOGGER.debug("This system has no Unix datagram sockets, polling instead: %s", error)
            return None
        created.setblocking(False)
        path = self._folder / self.name
        self._pid = os.getpid()
        # Also called when the process exits, or when the store is garbage-collected without having been closed.
        self._remove = weakref.finalize(self, _remove_socket, created, path, self._pid)
        try:
            _bind(created, path)
        except OSError as error:  # also raised if the path is too long
            LOGGER.debug("Cannot create %s, polling instead: %s", path, error)
            self._remove()
            return None
        return created

    # --- sending

    def has_peers(self) -> bool:
        """Return whether there may be another process. Lists the directory again if the last list is old."""
        if self._socket is None:
            return False
        if SYSTEM_CLOCK.now() - self._listed_at > LIST_INTERVAL_SECONDS:
            self.list_peers()
        return bool(self._peers)

    def add_peer(self, name: str) -> None:
        """Add the sender of a datagram."""
        if name not in self._peers and self._is_peer(name):
            self._peers.add(name)

    def list_peers(self) -> None:
        self._listed_at = SYSTEM_CLOCK.now()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._peers.update(name for file in self._folder.iterdir() if self._is_peer(name := file.name))

    def _is_peer(self, name: str) -> bool:
        return name != self.name and _SOCKET_NAME.fullmatch(name) is not None

    def send(self, datagram: bytes) -> None:
        """Send to all other processes. Callable from any thread."""
        if os.getpid() != self._pid:
            return  # a forked child: the socket is that of its parent
        for peer in list(self._peers):
            sender = self._socket
            if sender is None:
                return
            try:
                sender.sendto(datagram, f"{self._folder}/{peer}")
            except BlockingIOError:
                pass  # its buffer is full: the process will read other datagrams first, and polls
            except OSError as error:
                self._peers.discard(peer)
                if isinstance(error, ConnectionRefusedError):
                    with contextlib.suppress(OSError):
                        (self._folder / peer).unlink()

    # --- receiving

    def _receive(self) -> None:
        for _ in range(DATAGRAMS_PER_CALLBACK):
            if self._socket is None:
                return
            try:
                datagram = self._socket.recv(MAX_DATAGRAM_BYTES)
            except OSError:
                return  # no more
            self._on_datagram(datagram)


def _bind(created: socket.socket, path: Path) -> None:
    for attempt in range(1, BIND_ATTEMPTS + 1):
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
            path.parent.chmod(0o700)  # whatever the umask
        try:
            created.bind(str(path))
        except FileNotFoundError:
            if attempt == BIND_ATTEMPTS:
                raise
        else:
            path.chmod(0o600)
            return


def _remove_socket(created: socket.socket, path: Path, pid: int) -> None:
    """Close the socket. Remove it from the directory, and an empty directory, unless this is a forked child."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            path.unlink()  # first: a closed socket in the directory looks like that of a dead process
        with contextlib.suppress(OSError):
            path.parent.rmdir()
    created.close()
