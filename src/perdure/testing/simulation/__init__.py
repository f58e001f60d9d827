"""The simulator: several workers and clients in one process, on one seed.

The real engine, runner and stores run single-threaded on an event loop whose time is virtual (`loop`). Each worker and
client is a `Process` that can be frozen, killed and given a wrong clock; it reaches the store through a `Door` at which
calls take time, fail, or lose their answers, all as a `Plan` of faults says. Behind the doors a `Witness` sees every
write with its answer, in the one order in which they happened, and says when a promise of the store's seam or of the
engine is broken. Everything that is left to chance is drawn from the seed, so that a seed is one exact course.

What is executed, what clients ask for, and what must hold in the end, is not decided here: `tests/simulation` is
perdure's own use of it.
"""
