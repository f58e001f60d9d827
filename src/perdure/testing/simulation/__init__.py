"""The simulator: several workers and clients in one process, controlled by one seed.

The real engine, runner and stores run single-threaded on an event loop with virtual time (`event_loop`). Each worker
and client is a `Process` that can be frozen, killed and given a skewed clock. It reaches the store through a
`FaultyConnection`, where calls take time, fail or lose their results, as a `Plan` of faults defines. Behind the
connections an `InvariantChecker` records every write with its result, in the order of the store, and reports broken
guarantees of the store protocol or of the engine. All randomness comes from the seed, so that a seed defines one exact
trace.

The programs, the calls of clients and the final checks are not defined here: `tests/simulation` is the use of the
simulator by perdure itself.
"""
