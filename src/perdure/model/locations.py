"""Locations: the paths that name the entries of a run."""

from __future__ import annotations

_ESCAPES = str.maketrans({char: f"%{ord(char):02X}" for char in "%/#[]~"})


def escape_segment(name: str) -> str:
    """A name as one segment of a location: what would be structure there is written in another way."""
    return name if name.isidentifier() else name.translate(_ESCAPES)


def scope_of(location: str) -> str:
    """The path of the scope that an entry is in; "" is the workflow's own."""
    return location.rpartition("/")[0]


def segment_of(location: str) -> str:
    """The segment that a location was made of, without its number."""
    return location.rpartition("/")[2].partition("#")[0]
