"""Benchmarks: perdure compared with other engines. `make bench` runs all of them, `python -m benchmarks noop10` one.

    workloads/            one file per workload; its docstring says what it measures and why
    peers/                one file per engine: installation, use and capabilities
    harness.py            workloads, rounds and their results
    rounds.py             the rounds: measure every subject once, each in a new process
    run_subject.py        the program of that process for a workload's own subjects
    run_peer.py           the program of that process for engines, in their environments
    measurements.py       the measurements of engines, the same code for all of them
    step_bodies.py        what the workflows of the engines do
    peer_protocol.py      what a file of peers/ defines
    comparison.py         figures and ratios of engines
    compare_commits.py    the speed of the current tree relative to a commit: `make bench-compare`
    peer_environments.py  where peers are installed
    servers.py            PostgreSQL and Redis for the duration of a measurement
    raw_sqlite.py         the rows of a run without the engine: the limit of SQLite; raw_servers.py does so for servers
    recording_stores.py   stores that count their calls and record their batches
    waiting_workflows.py  runs that wait
    event_loop.py         the event loop of all Python processes
    machine_info.py       the machine of a measurement, and the memory of a process
    report.py             tables for the terminal and for docs/performance.md
    chart.py              the chart of docs/performance.md

No benchmark asserts on time: figures have targets, and the reader judges. What can be counted instead of timed is a
test, in `tests/engine/test_write_budget.py`.
"""
