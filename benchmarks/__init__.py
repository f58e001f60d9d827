"""What perdure costs, beside what others do. `make bench` measures everything, `python -m benchmarks noop10` a part.

    workloads/       one file per workload, which says what it measures and why
    peers/           one file per engine: how it is installed, how it is used, what it can do
    harness.py       workloads, rounds and what comes out of them
    rounds.py        the rounds: every subject once, each in a fresh process
    round.py         the other end, for subjects of a workload's own
    versus.py        the other end, for engines, in their environments
    driving.py       the measurements of engines, the same code for all of them
    chores.py        what their workflows do
    engines.py       what an engine has to say of itself to be compared
    comparison.py    figures and ratios of engines
    compare_commits.py  the current tree over another commit: `make bench-compare`
    environments.py  where peers are installed
    hosts.py         PostgreSQL and Redis for the time of a measurement
    raw.py           the rows of a run without the engine: the limit that SQLite sets; raw_servers.py likewise
    watched.py       stores that count their calls and remember what they were given
    sleeping.py      runs that wait
    machine.py       where it was measured, and what of a process can be measured
    report.py        tables for the terminal and for docs/performance.md; chart.py draws the chart there

Nothing here asserts on time: figures have targets, and the reader judges. What can be counted instead of timed is in
`tests/engine/test_write_budget.py`.
"""
