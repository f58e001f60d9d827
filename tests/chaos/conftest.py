"""Print the measurements of the tests at the end of the session."""

from __future__ import annotations

from itertools import chain

from _pytest.terminal import TerminalReporter


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    reports = chain.from_iterable(terminalreporter.getreports(outcome) for outcome in ("passed", "failed"))
    properties = [
        (report.nodeid, *each) for report in reports if report.when == "call" for each in report.user_properties
    ]
    if properties:
        terminalreporter.section("measured, in seconds")
        for test, name, seconds in properties:
            terminalreporter.write_line(f"{test.rpartition('::')[2]}: {name}: {seconds}")
