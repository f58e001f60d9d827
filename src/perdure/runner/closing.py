"""Close coroutines and async generators that are suspended, the innermost one first.

`coroutine.close` of Python 3.11 and 3.12 does not close an async generator in which the coroutine is suspended (inside
`asend`), nor what that generator awaits. The garbage collector would do so later, outside of the run.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Any

from perdure.runner.tasks import Closed

MAX_CLOSE_ATTEMPTS = 20  # a handler may await again after each GeneratorExit


def close_suspended(awaitable: Any, on_error: Callable[[BaseException], None]) -> bool:
    """Close a coroutine, or the `aclose` of an async generator, with everything that it awaits.

    `on_error` gets what handlers raise. False if a handler keeps awaiting something and cannot be closed.
    """
    for _ in range(MAX_CLOSE_ATTEMPTS):
        calls = reversed(list(_awaited_generator_calls(awaitable)))
        if all(_close(partial(_throw_exit, call), on_error) for call in calls) and _close(awaitable.close, on_error):
            return True
    return False


def _close(close: Callable[[], object], on_error: Callable[[BaseException], None]) -> bool:
    """Return whether `close` succeeds. False if a handler awaits something: then what is awaited must be closed too."""
    try:
        close()
    except (Closed, GeneratorExit, StopIteration, StopAsyncIteration):
        pass
    except BaseException as error:
        if isinstance(error, RuntimeError) and "ignored GeneratorExit" in str(error):
            return False
        on_error(error)
    return True


def _throw_exit(call: Any) -> None:
    call.throw(GeneratorExit)
    raise RuntimeError("async generator ignored GeneratorExit")


def _awaited_generator_calls(awaitable: Any) -> Iterator[Any]:
    """Yield the calls of async generators that a coroutine is suspended in, the outermost first."""
    while awaitable is not None:
        if isinstance(awaitable, _GENERATOR_CALLS):
            yield awaitable
        if isinstance(awaitable, _OPAQUE):
            # These types do not show what they await.
            awaitable = next((each for each in gc.get_referents(awaitable) if _is_followed(each)), None)
        else:
            awaitable = (
                getattr(awaitable, "cr_await", None)
                or getattr(awaitable, "ag_await", None)
                or getattr(awaitable, "gi_yieldfrom", None)
            )


def _is_followed(found: Any) -> bool:
    return inspect.isasyncgen(found) or inspect.iscoroutine(found) or isinstance(found, _OPAQUE)


async def _generator() -> AsyncGenerator[None, None]:
    yield


async def _coroutine() -> None: ...


def _types() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Return the types of the calls of async generators, and with them those of other awaitables to look through."""
    generator, coroutine = _generator(), _coroutine()
    calls = (generator.asend(None), generator.athrow(GeneratorExit))
    others = (anext(generator, None), coroutine.__await__())
    coroutine.close()
    for call in (*calls, others[0]):
        call.close()  # otherwise Python warns that they were never awaited
    types = tuple(type(call) for call in calls)
    return types, (*types, *(type(other) for other in others))


_GENERATOR_CALLS, _OPAQUE = _types()
