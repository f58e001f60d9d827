"""ctx.tag: tags that a run changes, and the tags that its code sees.

The record of a run has its latest tags. Its code must see the same tags on every replay, so each change is an entry
that also records what it replaced. `tags_at_start` undoes the recorded changes; each of them is applied again when it
is replayed. A change from outside is no entry: the code sees it from the next load of the run on.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from perdure.codec import Codec
from perdure.model.records import Entry, EntryStatus
from perdure.model.tags import TagChanges, Tags, TagValue, decode_tag_changes, encode_tag_changes, merge_tags
from perdure.model.validation import check_tag_changes
from perdure.workflows.commands import Command
from perdure.workflows.durable_call import CommandCall

KIND = "tag"


class RecordedChange(Struct, frozen=True):
    """The detail of a tag entry: the changed tags, and what they were before."""

    set: msgspec.Raw
    before: msgspec.Raw


class TagHost(Protocol):
    """The run, as this module uses it."""

    @property
    def codec(self) -> Codec: ...

    @property
    def tags(self) -> Tags: ...

    def set_tags(self, tags: Tags) -> None: ...

    def issue(self, command: Command) -> Any: ...

    def next_number(self) -> int: ...


def tag(run: TagHost, given: TagChanges | None, named: TagChanges) -> Coroutine[None, None, None]:
    """Return a durable call that changes tags of the run."""
    changes = check_tag_changes(given, named, tags=run.tags)
    encoded = run.codec.encode(changes, what="tags")

    def request() -> Any:
        before = {key: run.tags.get(key) for key in changes}
        detail = RecordedChange(msgspec.Raw(encode_tag_changes(changes)), msgspec.Raw(encode_tag_changes(before)))
        return run.issue(
            Command(
                kind=KIND,
                name=KIND,
                segment=KIND,
                immediate_value=encoded,
                detail=msgspec.json.encode(detail),
                tags=changes,
                read=lambda entry: run.set_tags(merge_tags(run.tags, recorded_change(entry)[0])),
            )
        )

    return CommandCall(KIND, request, run.next_number())


def recorded_change(entry: Entry) -> tuple[TagChanges, TagChanges]:
    """Return the tags that an entry has changed, and their values before: None for a tag that was missing."""
    detail = msgspec.json.decode(entry.detail or b"", type=RecordedChange)
    return decode_tag_changes(bytes(detail.set)), decode_tag_changes(bytes(detail.before))


def tags_at_start(tags: Tags, history: Iterable[Entry]) -> dict[str, TagValue]:
    """Return the tags of a run before the changes that these entries have recorded."""
    changes = [entry for entry in history if entry.kind == KIND and entry.status is EntryStatus.SUCCEEDED]
    for entry in sorted(changes, key=lambda entry: entry.seq or 0, reverse=True):
        tags = merge_tags(tags, recorded_change(entry)[1])
    return dict(tags)
