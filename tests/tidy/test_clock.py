"""Only `clock.py` reads time or waits for it; everything else is given a clock.

This is what lets the whole engine run on virtual time: one stray `time.monotonic()` and a test that skips a month
hangs or lies.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.tidy.sources import Module, dotted_names, package_modules, resolve

CLOCK = "perdure.clock"

_TIME = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
BANNED = {
    *(f"time.{name}" for name in _TIME),
    *(f"time.{name}_ns" for name in _TIME),
    "time.sleep",
    "time.localtime",
    "time.gmtime",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
    "uuid.uuid1",
}

# (module, what it reads) -> why it may.
ALLOWED: dict[tuple[str, str], str] = {}


def test_only_the_clock_module_reads_time():
    faults = [
        f"{module.path}:{line} reads {what}"
        for module, what, line in _package_reads()
        if module.name != CLOCK and (module.name, what) not in ALLOWED
    ]
    assert not faults, "\n".join(faults)


def test_every_exception_is_still_needed():
    used = {(module.name, what) for module, what, _ in _package_reads()}
    assert set(ALLOWED) - used == set()


def _package_reads() -> Iterator[tuple[Module, str, int]]:
    for module in package_modules().values():
        for what, line in clock_reads(module.tree):
            yield module, what, line


def clock_reads(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What in this module reads a clock or sleeps on one, and in which line."""
    names = dotted_names(tree)
    yields_only = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_sleep_zero(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_loop_time(node, names):
            yield "loop.time", node.lineno
        elif isinstance(node, (ast.Name, ast.Attribute)):
            what = resolve(node, names)
            if what in BANNED or (what == "asyncio.sleep" and id(node) not in yields_only):
                yield what, node.lineno


def _is_sleep_zero(call: ast.Call) -> bool:
    """`asyncio.sleep(0)` lets others run, and waits for no clock."""
    return len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def _is_loop_time(call: ast.Call, names: dict[str, str]) -> bool:
    """`loop.time()`, whatever the loop is called."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "time"
        and not call.args
        and not call.keywords
        and resolve(call.func, names) is None
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\ntime.time()", ["time.time"]),
        ("import time as t\nt.monotonic_ns()", ["time.monotonic_ns"]),
        ("from time import perf_counter as tick\ntick()", ["time.perf_counter"]),
        ("import time\nread = time.monotonic", ["time.monotonic"]),
        ("def f():\n    import time\n    time.sleep(1)", ["time.sleep"]),
        ("from datetime import UTC, datetime\ndatetime.now(UTC)", ["datetime.datetime.now"]),
        ("import datetime as dt\ndt.datetime.utcnow()", ["datetime.datetime.utcnow"]),
        ("from datetime import date\ndate.today()", ["datetime.date.today"]),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0.1)", ["asyncio.sleep"]),
        ("import asyncio\nasync def f(s):\n    await asyncio.sleep(s)", ["asyncio.sleep"]),
        ("from asyncio import sleep\nnap = sleep", ["asyncio.sleep"]),
        ("import asyncio\nasyncio.get_running_loop().time()", ["loop.time"]),
        ("def f(self):\n    return self._loop.time()", ["loop.time"]),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0)", []),
        ("from datetime import UTC, datetime\ndatetime.fromtimestamp(0, UTC)", []),
        ("def f(clock):\n    return clock.now()", []),
        ("def f(time):\n    return time", []),
    ],
)
def test_what_counts_as_reading_time(source, found):
    assert [what for what, _ in clock_reads(ast.parse(source))] == found
