from __future__ import annotations

from pathlib import Path

import pytest

from perdure.store.base import Store
from perdure.store.sqlite import SqliteStore
from perdure.testing.store_contract import StoreContract


class TestSqliteStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = str(tmp_path / "store.db")

    async def make_store(self) -> Store:
        return SqliteStore(self.path)

    async def again(self, store: Store) -> Store:
        return SqliteStore(self.path)
