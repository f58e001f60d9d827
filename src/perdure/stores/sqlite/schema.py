"""Opening a SQLite file: is it one, is it ours, do we know its version; then the migrations that it lacks.

Everything that is refused here says what to do, and leaves the file as it was.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import apsw

from perdure.errors import StoreError

APPLICATION_ID = 0x50_44_55_52  # "PDUR": how a file of ours is known
SAFE_TO_SHARE = (3, 51, 3)  # before, two connections that write and checkpoint could corrupt a WAL file
SYNCHRONOUS = ("full", "normal", "off")


def connect(path: str, *, synchronous: str, busy_timeout: float, read_only: bool = False) -> apsw.Connection:
    """A connection with our settings."""
    connection = apsw.Connection(path, statementcachesize=200)
    connection.set_busy_timeout(round(busy_timeout * 1000))
    # A process forked off must not write the log back when its copy of the connection is thrown away.
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    # One plan per statement, whatever is bound to it: else some are prepared anew each time, at twenty times the cost.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    with _explained(path):
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA cache_size = -16000")
        connection.execute(f"PRAGMA query_only = {read_only}")
    return connection


def check_path(path: str) -> None:
    """Refuse places where no file can be, in words that SQLite does not have."""
    file = Path(path)
    folder = file.parent
    if file.is_dir():
        raise StoreError(f"{path!r} is a directory; give the path of a file in it")
    if not folder.exists():
        raise StoreError(f"cannot make {path!r}: the directory {str(folder)!r} does not exist; create it first")
    if not folder.is_dir():
        raise StoreError(f"cannot make {path!r}: {str(folder)!r} is not a directory")
    if file.exists() and not file.is_file():
        raise StoreError(f"{path!r} is not a regular file; give the path of one")
    if file.exists():
        if not os.access(file, os.W_OK):
            raise StoreError(f"{path!r} cannot be written to; change its permissions, or give another path")
        return  # not opened to find out: closing it would drop the locks of other connections in this process
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return  # another process was first
    except OSError as error:
        raise StoreError(
            f"cannot make {path!r} ({error.strerror}); change permissions, or give another path"
        ) from error


def prepare(connection: apsw.Connection, path: str, shards: int) -> None:
    """Make the file ready: new ones are made, old ones migrated, foreign and newer ones refused."""
    with _explained(path):
        if connection.readonly("main"):
            raise apsw.ReadOnlyError
        connection.execute("BEGIN")  # one moment for all that tells: another process may be making the file just now
        version = _version(connection, path)
        connection.execute("COMMIT")
        if version < len(migrations()):
            _migrate(connection, path, shards)
        _use_write_ahead_log(connection)
        _check_shards(connection, path, shards)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """What SQLite says of a file that it cannot use, in words that help."""
    try:
        yield
    except apsw.NotADBError as error:
        raise StoreError(
            f"{path!r} is not a SQLite database; give the path of a new file, or of one of ours"
        ) from error
    except apsw.CorruptError as error:
        raise StoreError(f"{path!r} is damaged ({error}); restore it from a backup") from error
    except apsw.ReadOnlyError as error:
        raise StoreError(f"{path!r} cannot be written to; change its permissions, or give another path") from error
    except apsw.CantOpenError as error:
        raise StoreError(f"{path!r} cannot be opened ({error}); check the permissions of its directory") from error


def migrations() -> list[str]:
    """The scripts in order; the number of a file's schema version is how many of them it has seen."""
    folder = importlib.resources.files("perdure.stores.sqlite") / "migrations"
    scripts = sorted((file.name, file) for file in folder.iterdir() if file.name.endswith(".sql"))
    return [file.read_text("utf-8") for _, file in scripts]


def _version(connection: apsw.Connection, path: str) -> int:
    """The file's schema version, 0 if it is new; raises if it is not for us."""
    application = connection.pragma("application_id")
    version = connection.pragma("user_version")
    empty = connection.execute("SELECT count(*) FROM sqlite_schema").get == 0
    if application == 0 and version == 0 and empty:
        return 0
    if application != APPLICATION_ID:
        raise StoreError(f"{path!r} is a SQLite database, but not one of perdure's; give another path")
    known = len(migrations())
    if version > known:
        raise StoreError(
            f"{path!r} has schema version {version}, and this perdure knows {known} at most; upgrade perdure, "
            "or open a file that an older one wrote"
        )
    assert isinstance(version, int)
    return version


def _migrate(connection: apsw.Connection, path: str, shards: int) -> None:
    """Run the scripts that the file lacks, all or none, while nobody else may write."""
    connection.execute("BEGIN EXCLUSIVE")
    version = _version(connection, path)  # again: another process may have been first
    for script in migrations()[version:]:
        connection.execute(script)
    if version == 0:
        connection.execute("INSERT INTO meta (key, value) VALUES ('shards', ?)", (str(shards),))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {len(migrations())}")
    connection.execute("COMMIT")


def _use_write_ahead_log(connection: apsw.Connection) -> None:
    """Switch the file over. SQLite does not wait here for others who are opening it, so that we do."""
    for _ in range(200):
        with contextlib.suppress(apsw.BusyError):
            mode = connection.pragma("journal_mode", "wal")
            if mode != "wal":
                raise StoreError(
                    f"the file system does not let SQLite use its write-ahead log (mode {mode}); move the file"
                )
            return
        threading.Event().wait(0.025)
    raise StoreError("other processes keep the file locked while it is opened; try again", retryable=True)


def _check_shards(connection: apsw.Connection, path: str, shards: int) -> None:
    stored = int(connection.execute("SELECT value FROM meta WHERE key = 'shards'").get)
    if stored != shards:
        raise StoreError(f"{path!r} is cut into {stored} shards, not {shards}; open it with shards={stored}")


# --- libraries that must not share ---------------------------------------------------------------------------------


def library_version() -> tuple[int, ...]:
    """The version of the SQLite library in use."""
    return tuple(int(part) for part in apsw.sqlite_lib_version().split("."))


class ExclusiveLock:
    """A lock on a file beside the database, held while a library is in use that cannot share it safely."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._file: IO[bytes] | None = None

    def take_if_needed(self) -> None:
        """Nothing on a sound library; on others, keep everybody else out, or stay out."""
        version = library_version()
        if version >= SAFE_TO_SHARE or self._file is not None:
            return
        advice = (
            f"SQLite {'.'.join(map(str, version))} can damage a file that is shared; upgrade apsw to 3.51.3 or later"
        )
        try:
            import fcntl
        except ImportError as error:
            raise StoreError(f"{advice} (this system has no file locks to keep others out)") from error
        file = Path(f"{self._path}-sole-use").open("ab")  # noqa: SIM115 - held until release
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise StoreError(f"{str(self._path)!r} is in use elsewhere, and {advice}") from error
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
