"""Acceptance: call the `accept` function of a receive, and build the rejection that follows from it.

The decision is not an entry. A rejected message leaves the inbox in the commit that publishes its rejection; an
accepted one is in the entry of its receive. So no replay calls `accept` for a message again. A commit that is rejected
or never happens has decided nothing: the message is still in the inbox, and the present code decides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import Context as VariableContext
from typing import Any

from perdure.codec import Codec
from perdure.errors import WorkflowMisuse
from perdure.model.records import ErrorRecord
from perdure.workflows.replies import rejection_error


def find_rejection(
    accept: Callable[[Any], Any], value: Any, codec: Codec, variables: VariableContext
) -> ErrorRecord | None:
    """Return why `accept` rejects a value; None if it accepts it.

    The function runs in a copy of the run's context variables, outside of the workflow's event loop: durable calls in
    it raise `WorkflowMisuse`. Whatever it raises is a rejection, so that a defect of the function lets no value pass.
    """
    name = getattr(accept, "__name__", type(accept).__name__)
    try:
        result = variables.copy().run(accept, value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return rejection_error(error, codec)
    if result is None or result is True:
        return None
    if result is False:
        return rejection_error(f"rejected by {name}", codec)
    if inspect.iscoroutine(result):
        result.close()
    kind = type(result).__name__
    return rejection_error(WorkflowMisuse(f"{name} must return None, True or False, not {kind}"), codec)
