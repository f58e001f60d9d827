"""The Redis store keeps the contract: in one slice, where a batch is one call, and in many, as on a cluster."""

import pytest

from perdure.stores.redis import fast_path
from perdure.stores.redis.store import RedisStore
from perdure.testing import StoreContract
from perdure.testing.contract.commit_turn import TurnCases
from perdure.testing.contract.end_run import EndingCases
from perdure.testing.contract.finalization import ObservingCases
from perdure.testing.contract.history import HistoryCases
from tests.servers.redis import prefix_of_its_own


class _UnderAPrefix:
    @pytest.fixture(autouse=True)
    def _server(self):
        with prefix_of_its_own() as self._url:
            yield

    async def make_store(self):
        return RedisStore(self._url)

    async def again(self, store):
        return RedisStore(self._url)


class TestRedisStore(_UnderAPrefix, StoreContract):
    pass


class TestNothingIsPlain(_UnderAPrefix, TurnCases, HistoryCases, EndingCases, ObservingCases):
    """What is left to the rules of all writes obeys the same ones as what is plain."""

    @pytest.fixture(autouse=True)
    def _nothing_is_plain(self, monkeypatch):
        monkeypatch.setattr(fast_path, "build_call", lambda *_: None)


class TestRedisStoreInSlices(TestRedisStore):
    """Every slice is judged alone, and what crosses from one to another goes through outboxes."""

    @pytest.fixture(autouse=True)
    def _server(self):
        with prefix_of_its_own(partitions=16) as self._url:
            yield
