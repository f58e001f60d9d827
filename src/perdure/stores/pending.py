"""Temporary: methods of the Store protocol that a store does not implement yet. Deleted when all four stores do."""

from __future__ import annotations

from typing import Any


class PendingMethods:
    """Raises for every new method, so that `isinstance(store, Store)` holds while the stores are extended."""

    async def count(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def topics(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def document(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def documents(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def queues(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def queue_view(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def places(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def place(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def places_ahead(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
