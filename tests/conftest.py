"""Settings for the whole suite: how property tests choose examples, and that servers are left as they were."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.servers import postgres_schemas as schemas
from tests.servers import redis_prefixes as prefixes

# No deadlines: no test asserts on elapsed time. CI takes the same examples every time, so that it fails only for a
# reason in the change; elsewhere each run looks at new ones.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _borrowed_stores_go_back() -> Iterator[None]:
    """What a test has borrowed from a server (`tests/servers`) is the next one's when it is over."""
    yield
    schemas.release_all()
    prefixes.release_all()


def pytest_sessionfinish() -> None:
    schemas.drop_all()
