"""The Redis store passes the contract with one partition, where a batch is one call, and with many, as on a cluster."""

import pytest

from perdure.stores.redis import fast_path
from perdure.stores.redis.store import RedisStore
from perdure.testing import StoreContract
from perdure.testing.contract.commit_turn import CommitTurnCases
from perdure.testing.contract.end_run import EndRunCases
from perdure.testing.contract.finalization import ObserverCases
from perdure.testing.contract.history import HistoryCases
from perdure.testing.store_contract import ContractWithoutQueues
from tests.servers.redis import prefix_of_its_own


class _WithOwnPrefix:
    @pytest.fixture(autouse=True)
    def _server(self):
        with prefix_of_its_own() as self._url:
            yield

    async def make_store(self):
        return RedisStore(self._url)

    async def again(self, store):
        return RedisStore(self._url)


class TestRedisStore(_WithOwnPrefix, StoreContract):
    pass


class TestRedisStoreWithoutFastPath(_WithOwnPrefix, CommitTurnCases, HistoryCases, EndRunCases, ObserverCases):
    """The general path passes the tests that otherwise cover the fast path."""

    @pytest.fixture(autouse=True)
    def _disable_fast_path(self, monkeypatch):
        monkeypatch.setattr(fast_path, "build_call", lambda *_: None)


class TestPartitionedRedisStore(_WithOwnPrefix, ContractWithoutQueues):
    """Each partition is checked alone, and changes of other partitions go through outboxes. Queues are refused."""

    @pytest.fixture(autouse=True)
    def _server(self):
        with prefix_of_its_own(partitions=16) as self._url:
            yield
