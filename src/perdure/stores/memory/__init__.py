"""In-memory store. `MemoryStore` is public here: tests of other stores compare with it."""

from perdure.stores.memory.store import MemoryStore

__all__ = ["MemoryStore"]
