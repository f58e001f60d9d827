"""The Redis store keeps the contract: in one slice, where a batch is one call, and in many, as on a cluster."""

import pytest

from perdure.store.redis import RedisStore
from perdure.testing import StoreContract
from tests.servers.redis import prefix_of_its_own


class TestRedisStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self):
        with prefix_of_its_own() as self._url:
            yield

    async def make_store(self):
        return RedisStore(self._url)

    async def again(self, store):
        return RedisStore(self._url)


class TestRedisStoreInSlices(TestRedisStore):
    """Every slice is judged alone, and what crosses from one to another goes through outboxes."""

    @pytest.fixture(autouse=True)
    def _server(self):
        with prefix_of_its_own(slices=16) as self._url:
            yield
