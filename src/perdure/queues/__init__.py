"""Rules of work queues as pure functions: which runs an admission takes, and how rates are counted.

The package knows records and the interface of the stores. It reads no clock and calls no store.
"""
