"""The fingerprint of a workflow's code: equal for equal code in every process, different after a change."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.workflows.fingerprint import code_fingerprint

SHOP = """
    from dataclasses import dataclass
    from perdure import Context, step, workflow
    import shop_helpers

    LIMIT = 3
    NAMES = frozenset(("one", "two", "three", "four"))
    calls = 0

    @dataclass
    class Order:
        id: str
        cents: int

    @step
    async def charge(order: Order) -> str:
        return "receipt"

    def helper(n: int) -> int:
        return n + LIMIT

    @workflow
    async def checkout(ctx: Context, order: Order) -> str:
        global calls
        calls += 1
        if order.id in {"a", "b", "c"} or order.id in NAMES:
            await ctx.sleep(helper(1) + shop_helpers.pause())
        return await charge(order)
"""
HELPERS = """
    import os

    HOST = f"host-{os.getpid()}"

    def pause():
        return 5 if HOST else 6
"""
REPORT = """
    import sys
    from perdure.workflows.fingerprint import code_fingerprint
    import shop
    shop.calls = int(sys.argv[1])
    print(code_fingerprint(shop.checkout.fn))
"""


def fingerprint_in_process(folder: Path, shop: str = SHOP, helpers: str = HELPERS, calls: int = 0) -> str:
    """Return the fingerprint that a new process computes."""
    folder.mkdir(exist_ok=True)
    for name, text in (("shop", shop), ("shop_helpers", helpers), ("report", REPORT)):
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    path = os.pathsep.join((str(folder), *sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "random"}
    command = [sys.executable, "-m", "report", str(calls)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=True, text=True)
    return done.stdout.splitlines()[-1]


def test_fingerprint_is_the_same_in_another_process(tmp_path: Path) -> None:
    assert fingerprint_in_process(tmp_path / "a") == fingerprint_in_process(tmp_path / "b", calls=7)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("await charge(order)", "await charge(order) + '!'"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("return n + LIMIT", "return n - LIMIT"),
        ("cents: int", "cents: float"),
        ("return 5", "return 50"),
        ('"four"', '"five"'),
        ("@step\n", '@step(name="renamed")\n'),
    ],
)
def test_fingerprint_changes_with_the_code(tmp_path: Path, old: str, new: str) -> None:
    changed = (SHOP.replace(old, new), HELPERS.replace(old, new))
    assert changed != (SHOP, HELPERS)
    assert fingerprint_in_process(tmp_path, *changed) != fingerprint_in_process(tmp_path)


def test_body_of_a_step_does_not_count(tmp_path: Path) -> None:
    changed = SHOP.replace('return "receipt"', 'return "another receipt"')
    assert fingerprint_in_process(tmp_path, changed) == fingerprint_in_process(tmp_path)


def workflow_with(value: Any) -> Callable[..., Any]:
    async def flow(ctx: Any) -> Any:
        return value

    return flow


def test_values_of_enclosing_functions_count() -> None:
    assert code_fingerprint(workflow_with(1)) == code_fingerprint(workflow_with(1))
    assert code_fingerprint(workflow_with(1)) != code_fingerprint(workflow_with(2))
    assert code_fingerprint(workflow_with(workflow_with)) != code_fingerprint(workflow_with(1))


def test_counters_that_the_code_assigns_do_not_count() -> None:
    tries = 0

    async def flow(ctx: Any) -> None:
        nonlocal tries
        tries += 1

    before = code_fingerprint(flow)
    tries = 5
    assert code_fingerprint(flow) == before


def test_code_without_a_fingerprint_does_not_raise() -> None:
    class Hostile:
        @property
        def __module__(self) -> str:  # type: ignore[override]
            raise RuntimeError("no module")

    assert code_fingerprint(Hostile()) is None  # type: ignore[arg-type]
