"""The workloads, in the order in which they are run. Each is a file with a `WORKLOAD`; add its name here."""

NAMES = ("noop10", "latency", "recovery", "fanout", "history", "sleepers", "evicted", "events", "fleet")
