"""Open a SQLite file: check that it is a store of a known version, then apply the missing migrations.

A refused file is not changed, and the error message says what to do.
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

APPLICATION_ID = 0x50_44_55_32  # "PDU2": marks a file as a store of perdure
_OLD_APPLICATION_IDS = (0x50_44_55_52,)  # "PDUR": stores of unreleased versions with other table and column names
SAFE_TO_SHARE = (3, 51, 3)  # in earlier versions, two connections that write and checkpoint can corrupt a WAL file
SYNCHRONOUS = ("full", "normal", "off")
PRIVATE = 0o600  # mode of new files: payloads may be personal data, and the keys of tokens are secrets


def connect(path: str, *, synchronous: str, busy_timeout: float, read_only: bool = False) -> apsw.Connection:
    """Return a connection with the settings of the store."""
    connection = apsw.Connection(path, statementcachesize=200)
    connection.set_busy_timeout(round(busy_timeout * 1000))
    # A forked child must not checkpoint when its copy of the connection is garbage-collected.
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    # One plan per statement for all bound values. Without it, SQLite prepares some statements again for new values,
    # which makes them twenty times as expensive.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    with _explained(path):
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA cache_size = -16000")
        connection.execute(f"PRAGMA query_only = {read_only}")
    return connection


def check_path(path: str) -> None:
    """Refuse a path that cannot be a database file, with clearer errors than SQLite's. Create a missing file."""
    try:
        _check_path(path)
    except (OSError, ValueError) as error:  # a name that is too long, a directory that cannot be read, ...
        raise StoreError(f"{path!r} cannot be used as a path ({error}); use another one") from error


def _check_path(path: str) -> None:
    file = Path(path)
    folder = file.parent
    if file.is_dir():
        raise StoreError(f"{path!r} is a directory; use the path of a file in it")
    if not folder.exists():
        raise StoreError(f"cannot create {path!r}: the directory {str(folder)!r} does not exist; create it first")
    if not folder.is_dir():
        raise StoreError(f"cannot create {path!r}: {str(folder)!r} is not a directory")
    if file.exists() and not file.is_file():
        raise StoreError(f"{path!r} is not a regular file; use the path of one")
    if file.exists():
        if not os.access(file, os.W_OK):
            raise StoreError(f"{path!r} cannot be written to; change its permissions, or use another path")
        # Not opened as a test: closing the file would drop the locks of this process's connections to it.
        return
    try:
        os.close(open_private(path, os.O_CREAT | os.O_EXCL | os.O_RDWR))
    except FileExistsError:
        return  # another process created it first
    except OSError as error:
        raise StoreError(
            f"cannot create {path!r} ({error.strerror}); change its permissions, or use another path"
        ) from error


def open_private(path: str, flags: int) -> int:
    """Open a file and return its descriptor. A new file has the mode 0600, whatever the umask.

    SQLite gives its other files (-wal, -shm, -journal) the mode of the database. An existing file keeps its mode.
    """
    existed = Path(path).exists()
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), PRIVATE)
    if not existed and hasattr(os, "fchmod"):
        os.fchmod(descriptor, PRIVATE)  # the umask may have removed bits
    return descriptor


class FileIdentity:
    """Which file a path named when the store was opened. A path that names another file, or none, is an error.

    SQLite would not notice: it continues to write to the file that it has open, and its commits would be lost.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        status = Path(path).stat()
        self._device, self._inode = status.st_dev, status.st_ino
        self.loss = ""  # what happened to the file, for the error message

    def is_lost(self) -> bool:
        """Return whether the path names another file or none, now or at an earlier call. Takes about 2 us."""
        if self.loss:
            return True
        try:
            status = os.stat(self._path)  # noqa: PTH116 - a Path would take twice as long
        except (FileNotFoundError, NotADirectoryError):
            self.loss = self._describe("was deleted or moved")
        except OSError:
            return False  # unknown, for example a network file system that does not respond
        else:
            if status.st_ino == self._inode and status.st_dev == self._device:
                return False
            self.loss = self._describe("was replaced by another file")
        return True

    def _describe(self, change: str) -> str:
        return (
            f"{self._path!r} {change} while the store was open, and nothing more can be stored in it; restart the "
            "program, which then uses the file that it finds there"
        )


def prepare(connection: apsw.Connection, path: str, shards: int) -> None:
    """Create the tables of a new file, or migrate an older one. Refuse other applications and newer versions."""
    with _explained(path):
        if connection.readonly("main"):
            raise apsw.ReadOnlyError
        connection.execute("BEGIN")  # one snapshot for all checks: another process may be creating the tables
        version = _version(connection, path)
        connection.execute("COMMIT")
        if version < len(migrations()):
            _migrate(connection, path, shards)
        _use_write_ahead_log(connection)
        _check_shards(connection, path, shards)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Raise SQLite's errors about the file as `StoreError`s that say what to do."""
    try:
        yield
    except apsw.NotADBError as error:
        raise StoreError(
            f"{path!r} is not a SQLite database; use the path of a new file or of a perdure store"
        ) from error
    except apsw.CorruptError as error:
        raise StoreError(f"{path!r} is damaged ({error}); restore it from a backup") from error
    except apsw.ReadOnlyError as error:
        raise StoreError(f"{path!r} cannot be written to; change its permissions, or use another path") from error
    except apsw.CantOpenError as error:
        raise StoreError(f"{path!r} cannot be opened ({error}); check the permissions of its directory") from error


def migrations() -> list[str]:
    """Return the migration scripts in order. The schema version of a file is the number of scripts applied to it."""
    folder = importlib.resources.files("perdure.stores.sqlite") / "migrations"
    scripts = sorted((file.name, file) for file in folder.iterdir() if file.name.endswith(".sql"))
    return [file.read_text("utf-8") for _, file in scripts]


def _version(connection: apsw.Connection, path: str) -> int:
    """Return the file's schema version, 0 if the file is new. Raise `StoreError` if this version cannot use it."""
    application = connection.pragma("application_id")
    version = connection.pragma("user_version")
    empty = connection.execute("SELECT count(*) FROM sqlite_schema").get == 0
    if application == 0 and version == 0 and empty:
        return 0
    if application in _OLD_APPLICATION_IDS:
        raise StoreError(
            f"{path!r} was written by an unreleased version of perdure and cannot be read by this one; use a new file"
        )
    if application != APPLICATION_ID:
        raise StoreError(f"{path!r} is a SQLite database, but not a store of perdure; use another path")
    known = len(migrations())
    if version > known:
        raise StoreError(
            f"{path!r} has schema version {version}, but this version of perdure supports at most {known}; upgrade "
            "perdure, or use another file"
        )
    assert isinstance(version, int)
    return version


def _migrate(connection: apsw.Connection, path: str, shards: int) -> None:
    """Apply the missing migrations in one transaction, while no other process may write."""
    connection.execute("BEGIN EXCLUSIVE")
    version = _version(connection, path)  # again under the lock: another process may have migrated the file
    for script in migrations()[version:]:
        connection.execute(script)
    if version == 0:
        connection.execute("INSERT INTO meta (key, value) VALUES ('shards', ?)", (str(shards),))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {len(migrations())}")
    connection.execute("COMMIT")


def _use_write_ahead_log(connection: apsw.Connection) -> None:
    """Switch the file to WAL mode. SQLite does not wait for other processes here, so this function retries."""
    for _ in range(200):
        with contextlib.suppress(apsw.BusyError):
            mode = connection.pragma("journal_mode", "wal")
            if mode != "wal":
                raise StoreError(
                    f"the file system does not support SQLite's write-ahead log (journal mode {mode}); move the file"
                )
            return
        threading.Event().wait(0.025)
    raise StoreError("other processes keep the file locked while it is being opened; try again", retryable=True)


def _check_shards(connection: apsw.Connection, path: str, shards: int) -> None:
    stored = int(connection.execute("SELECT value FROM meta WHERE key = 'shards'").get)
    if stored != shards:
        raise StoreError(f"{path!r} has {stored} shards, not {shards}; open it with shards={stored}")


# --- SQLite versions that must not share a file --------------------------------------------------------------------


def library_version() -> tuple[int, ...]:
    """Return the version of the SQLite library."""
    return tuple(int(part) for part in apsw.sqlite_lib_version().split("."))


class ExclusiveLock:
    """A lock file beside the database, held while the SQLite library cannot share the file safely."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._file: IO[bytes] | None = None

    def take_if_needed(self) -> None:
        """Take the lock if the library is older than `SAFE_TO_SHARE`. Raise `StoreError` if another process has it."""
        version = library_version()
        if version >= SAFE_TO_SHARE or self._file is not None:
            return
        advice = f"SQLite {'.'.join(map(str, version))} can damage a shared file; upgrade apsw to 3.51.3 or later"
        try:
            import fcntl
        except ImportError as error:
            raise StoreError(f"{advice} (this system has no file locks to exclude other processes)") from error
        file = os.fdopen(open_private(f"{self._path}-sole-use", os.O_CREAT | os.O_RDWR), "ab")  # held until release
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise StoreError(f"{str(self._path)!r} is in use by another process, and {advice}") from error
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
