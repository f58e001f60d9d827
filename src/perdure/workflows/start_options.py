"""Options of one start: of `start`, `execute`, `perdure.run` and `wf.options(...)`.

The names are always options, whether this version supports them or not. So a keyword argument of `start` is either an
option or a part of the payload, and that does not change when an option is added. This module knows no workflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict, get_args

from msgspec import UNSET, Struct, UnsetType

from perdure.errors import InvalidArgument
from perdure.model.tags import Tags
from perdure.model.validation import describe_value
from perdure.workflows.work_queues import Debounce, WorkQueue

IfExists = Literal["observe", "reject", "restart_ended", "restart"]
IF_EXISTS: tuple[str, ...] = get_args(IfExists)
OnDuplicate = Literal["existing", "replace", "refuse"]


class StartKeywords(TypedDict, total=False):
    """The options of a start as keyword arguments; see `StartOptions`."""

    id: str | None
    tags: Tags | None
    queue: WorkQueue | str | None
    delay: float | timedelta | None
    retention: float | timedelta | None
    timeout: float | timedelta | None
    if_exists: IfExists
    send: Sequence[Any]
    priority: int | None
    partition: str | None
    dedupe: str | None
    on_duplicate: OnDuplicate | None
    debounce: Debounce | None
    max_wait: float | timedelta | None


class StartOptions(Struct, frozen=True):
    """Options of one start.

    `if_exists` says what happens if the id is taken. `send` are the first messages: events, (name, payload) pairs, or
    dicts with the arguments of `send`. `timeout` replaces the timeout of the workflow.

    `queue` is a `WorkQueue` or its name; None bypasses the queue of the workflow. A lower `priority` is admitted first
    within its `partition`, which replaces the queue's `partition_key`. `dedupe` is a key: while a run of the queue has
    it, `on_duplicate` says what happens. `debounce` delays the start and joins it with later ones. A run that is not
    admitted within `max_wait` is cancelled.
    """

    id: str | None = None
    tags: Tags | None = None
    queue: WorkQueue | str | UnsetType | None = UNSET
    delay: float | timedelta | None = None
    retention: float | timedelta | None = None
    timeout: float | timedelta | None = None
    if_exists: IfExists = "observe"
    send: Sequence[Any] = ()
    priority: int | None = None
    partition: str | None = None
    dedupe: str | None = None
    on_duplicate: OnDuplicate | None = None
    debounce: Debounce | None = None
    max_wait: float | timedelta | None = None

    @property
    def has_place(self) -> bool:
        """Whether an option is about a queue."""
        if self is NO_OPTIONS:  # the common case
            return False
        return self.queue is not UNSET or any(getattr(self, name) is not None for name in PLACE_OPTIONS)

    @property
    def fits_child(self) -> bool:
        """Whether only options are set that the start of a child takes."""
        given = StartOptions(id=self.id, queue=self.queue, priority=self.priority, partition=self.partition)
        return self == given


NO_OPTIONS = StartOptions()
PLACE_OPTIONS = ("priority", "partition", "dedupe", "on_duplicate", "debounce", "max_wait")
UNSUPPORTED = ("connection",)
"""Names that are reserved for options which this version does not support."""
_SUPPORTED = frozenset(StartOptions.__struct_fields__).difference(UNSUPPORTED)
OPTION_NAMES = _SUPPORTED.union(UNSUPPORTED)


def split_keywords(given: Mapping[str, Any]) -> tuple[StartOptions, dict[str, Any]]:
    """Return the options among these keyword arguments, and the others, which belong to the payload."""
    if given.keys() <= _SUPPORTED:  # the common case
        return build_start_options(given), {}
    options = {name: value for name, value in given.items() if name in OPTION_NAMES}
    payload = {name: value for name, value in given.items() if name not in OPTION_NAMES}
    return build_start_options(options), payload


def build_start_options(given: Mapping[str, Any]) -> StartOptions:
    """Return the options of one start. Raises `InvalidArgument` for an unknown or unsupported one."""
    if not given.keys() <= _SUPPORTED:
        given = _without_unset_unsupported(given)
    options = StartOptions(**given)
    if not isinstance(options.queue, WorkQueue | str | UnsetType | None):
        raise InvalidArgument(f"queue must be a WorkQueue or its name, not {describe_value(options.queue)}")
    if options.if_exists is not NO_OPTIONS.if_exists and options.if_exists not in IF_EXISTS:
        given_value = describe_value(options.if_exists)
        raise InvalidArgument(f"if_exists must be one of {', '.join(map(repr, IF_EXISTS))}, not {given_value}")
    if not isinstance(options.send, list | tuple):
        raise InvalidArgument(f"send must be a list of events, not {describe_value(options.send)}")
    return options


def _without_unset_unsupported(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without unsupported ones that are None. Raises `InvalidArgument` for all other names."""
    unknown = set(given) - OPTION_NAMES
    if unknown:
        raise InvalidArgument(
            f"a start has no option {', '.join(sorted(unknown))}; use {', '.join(StartOptions.__struct_fields__)}"
        )
    for name in UNSUPPORTED:
        if given.get(name) is not None:
            raise InvalidArgument(
                f"{name}= is an option of start that is not supported in this version; remove it. To pass a workflow "
                f"parameter of this name, pass it positionally or use start(wf.options(...), {name}=...)"
            )
    return {name: value for name, value in given.items() if name in _SUPPORTED}
