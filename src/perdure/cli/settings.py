"""Which store and which application a command uses.

An option wins over the environment (`PERDURE_STORE`), the environment over `[tool.perdure]` in the nearest
pyproject.toml. The default store is `sqlite:///perdure.db` in the current folder.

    [tool.perdure]
    store = "sqlite:///shop.db"    # relative to the folder of this file
    app = "app.shop:workflows"
    pool = "default"
    lifespan = "app.resources:lifespan"
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from perdure.cli.session import UsageError

DEFAULT_STORE = "sqlite:///perdure.db"
KNOWN = ("store", "app", "pool", "lifespan")


@dataclass(frozen=True, slots=True)
class Settings:
    """The table `[tool.perdure]`; `folder` is that of its pyproject.toml."""

    folder: Path | None = None
    store: str | None = None
    app: str | None = None
    pool: str | None = None
    lifespan: str | None = None


def find_settings(start: Path | None = None) -> Settings:
    """Return the settings of the nearest pyproject.toml that has any, from this folder upwards."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            table = _read(file)
            if table is not None:
                return Settings(folder, *(_text(file, table, name) for name in KNOWN))
    return Settings()


def store_url(given: str | None) -> str:
    """Return the URL of the store: given, configured, or the default."""
    if given:
        return given
    settings = find_settings()
    if settings.store is not None and settings.folder is not None:
        return _anchored(settings.store, settings.folder)
    return DEFAULT_STORE


def existing_store(url: str) -> str:
    """Return the URL; raise `UsageError` if it is a SQLite file that does not exist. Reading must not create one."""
    path = _file_of(url)
    if path is not None and not _exists(path):
        raise UsageError(
            f"there is no file {path}",
            f"name the store with --store or PERDURE_STORE; `perdure migrate --store {url}` creates an empty one",
            code=3,
        )
    return url


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no file can have this name
        return False


def _file_of(url: str) -> Path | None:
    scheme, _, rest = url.partition(":///")
    name = rest.partition("?")[0]
    return Path(unquote(name)) if scheme == "sqlite" and name else None


def _anchored(url: str, folder: Path) -> str:
    """Resolve a relative SQLite file against the folder of the pyproject.toml that names it."""
    path = _file_of(url)
    if path is None or path.is_absolute():
        return url
    _, mark, options = url.partition("?")
    return f"sqlite:///{quote(str(folder / path))}{mark}{options}"


def _read(file: Path) -> dict[str, object] | None:
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}", "fix it, or use --store") from None
    table = tool.get("perdure") if isinstance(tool, dict) else None
    if table is None:
        return None
    unknown = sorted(set(table) - set(KNOWN)) if isinstance(table, dict) else ["..."]
    if unknown:
        raise UsageError(f"[tool.perdure] in {file} has no setting {', '.join(unknown)}", f"it has {', '.join(KNOWN)}")
    found: dict[str, object] = table
    return found


def _text(file: Path, table: dict[str, object], name: str) -> str | None:
    value = table.get(name)
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{name} under [tool.perdure] in {file} must be a text, not {value!r}", f'{name} = "..."')
    return value
