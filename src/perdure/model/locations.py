"""Locations: the paths that identify the entries of a run. Pure string functions."""

from __future__ import annotations

_ESCAPES = str.maketrans({char: f"%{ord(char):02X}" for char in "%/#[]~"})


def escape_segment(name: str) -> str:
    """Return a name as one segment of a location, with structural characters percent-encoded."""
    return name if name.isidentifier() else name.translate(_ESCAPES)


def scope_of(location: str) -> str:
    """Return the path of the scope that contains an entry; "" is the scope of the workflow itself."""
    return location.rpartition("/")[0]


def segment_of(location: str) -> str:
    """Return the last segment of a location, without its number."""
    return location.rpartition("/")[2].partition("#")[0]


def is_cleanup(location: str) -> bool:
    """Return whether an entry is a compensation or an exit function that the run executes by itself."""
    return segment_of(scope_of(location)) in ("~rollback", "~exit")
