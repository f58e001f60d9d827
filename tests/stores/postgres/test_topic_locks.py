"""A batch locks the topics of the assignments that its writes release, before it locks runs."""

from __future__ import annotations

import json

import pytest

from perdure.model.turns import TurnExtras
from perdure.stores.postgres.store import PostgresStore
from perdure.stores.postgres.write_encoding import as_json
from perdure.stores.writes import Write
from perdure.testing.contract.builders import finalize, publish, suspended, turn, waiting
from tests.servers.postgres import postgres_url
from tests.stores.postgres.test_store import on, query

__all__ = ["postgres_url"]  # a fixture

RELEASES = [
    turn(1, owned=False, seen=9, patch=suspended(), extras=TurnExtras(released_assignments=(1,))),
    finalize(returned=(1,)),
]


@pytest.mark.parametrize("write", RELEASES, ids=["turn", "finalize"])
def test_topic_of_a_released_assignment_is_locked(postgres_url: str, write: Write) -> None:
    async def test(store: PostgresStore) -> None:
        await store.commit(waiting()[1:])
        await store.commit([publish()])
        statement = "SELECT * FROM {schema}.topics_of_releases($1::jsonb)"
        assert [row[0] for row in await query(postgres_url, statement, json.dumps([as_json(write)]))] == ["t"]

    on(postgres_url, test)
