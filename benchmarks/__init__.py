"""What perdure costs, measured. `python -m benchmarks` runs everything, `python -m benchmarks noop10` one workload.

    harness.py    workloads, rounds in fresh processes, what comes out of them
    round.py      the other end: one subject of one workload in a process of its own
    workloads/    one file per workload, which says what it measures and why
    raw.py        the rows of a run without the engine: the limit that a store sets
    watched.py    a SQLite store that counts its calls and remembers what it was given
    sleeping.py   runs that sleep
    machine.py    where it was measured, and what of a process can be measured
    report.py     tables for the terminal and for docs/performance.md

Nothing here asserts on time: figures have targets, and the reader judges. What can be counted instead of timed is in
`tests/engine/test_write_budget.py`.
"""
