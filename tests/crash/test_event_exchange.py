"""Events are sent and received once, although the process dies at random function calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.crash.process_harness import STORES, scenario
from tests.crash.programs.event_exchange import ITEMS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", STORES)
def test_events_arrive_once_wherever_the_process_is_killed(kind: str, seed: int, tmp_path: Path) -> None:
    with scenario(tmp_path, kind) as here:
        program = here.start("event_exchange", seed, talks=True)
        assert program.stdout is not None
        assert program.stdin is not None
        deaths = 0
        while program.stdout.readline() == b"died\n":
            deaths += 1
            program.stdin.write(b"\n")
            program.stdin.flush()
        program.stdin.close()
        here.until_ended(program)
        assert deaths, "it was killed at least once"
        results = {run: json.loads(result) for run, result in here.results().items()}
        assert results["collector"] == list(range(2 * ITEMS))
        assert [results[f"listener-{n}"] for n in range(2)] == [list(range(ITEMS))] * 2
        assert here.book.unread_events() == []
