"""The workloads, in execution order: workload id -> module of this package with its `WORKLOAD`."""

MODULES = {
    "noop10": "throughput",
    "latency": "latency",
    "recovery": "recovery",
    "fanout": "fan_out",
    "history": "long_history",
    "sleepers": "sleeping_runs",
    "evicted": "suspended_memory",
    "events": "events",
    "fleet": "multiple_workers",
    "follow": "follow",
    "schedules": "schedules",
    "search": "search",
    "queues": "queues",
}
