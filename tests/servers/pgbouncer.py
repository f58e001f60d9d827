"""A real PgBouncer in front of a PostgreSQL of the tests: the `pgbouncer` on the PATH.

No wheel brings one, so it is used by `make chaos` only, which fails without one and says what to install.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.servers.postgres import Server, unprivileged
from tests.servers.server_process import ServerProcess

PORT = 6432  # of a socket in a private directory, so it is always free
SETTINGS = {
    "listen_addr": "",
    "auth_type": "any",
    "pool_mode": "transaction",
    "default_pool_size": "2",  # fewer than the clients, so that they really share
    "server_lifetime": "5",  # seconds: a session that has seen very many schemas becomes slow
}


class PgBouncerMissing(RuntimeError):
    """PgBouncer is not installed."""

    def __init__(self) -> None:
        super().__init__("no PgBouncer to test with: put `pgbouncer` on the PATH (Debian: apt-get install pgbouncer)")


def program() -> str:
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if found is None:
        raise PgBouncerMissing
    return found


def version() -> tuple[int, int]:
    """Return whether the version is at least 1.21, which supports prepared statements in transaction mode."""
    version = subprocess.run([program(), "--version"], capture_output=True, text=True, check=True).stdout
    major, minor, *_ = version.split()[1].split(".")
    return int(major), int(minor)


class PgBouncer(ServerProcess):
    """In transaction mode, unless `settings` say otherwise."""

    name = "PgBouncer"
    in_order = signal.SIGINT

    def __init__(self, folder: Path, server: Server, **settings: str) -> None:
        super().__init__(folder)
        self._server = server
        self._settings = {**SETTINGS, **settings}

    @property
    def url(self) -> str:
        return f"postgresql://postgres@/postgres?host={quote(str(self.folder), safe='')}&port={PORT}"

    def _make(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        settings = {**self._settings, "unix_socket_dir": str(self.folder), "listen_port": str(PORT)}
        (self.folder / "settings.ini").write_text(
            f"[databases]\npostgres = host={self._server.socket} dbname=postgres user=postgres\n[pgbouncer]\n"
            + "".join(f"{name} = {value}\n" for name, value in settings.items())
        )
        if (user := unprivileged()) is not None:
            os.chown(self.folder, user.pw_uid, user.pw_gid)

    def _command(self) -> Sequence[str | Path]:
        return [program(), self.folder / "settings.ini"]

    def _options(self) -> dict[str, Any]:
        """Return the user for PgBouncer, which refuses to run as root."""
        user = unprivileged()
        return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.connect(str(self.folder / f".s.PGSQL.{PORT}"))
            return True
        return False
