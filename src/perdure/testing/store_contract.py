"""The suite that every store passes: subclass `StoreContract`, say how to make your store, and run pytest.

    class TestMyStore(StoreContract):
        async def make_store(self):
            return MyStore(...)           # new and empty, not yet open

        async def again(self, store):
            return MyStore(same data)     # a second handle; for a store in memory, `store` itself

Every promise of `perdure.stores.protocol` has a case here: what is refused and what is recognised, races through two
handles, lost answers, wake-ups, pages, and values. Cases are plain methods that run their own event loop; no plugin is
needed.
"""

from __future__ import annotations

from perdure.testing.contract.children_and_forks import FamilyCases, ForkCases
from perdure.testing.contract.commit_turn import TurnCases
from perdure.testing.contract.create_run import CreatingCases
from perdure.testing.contract.dead_letters import KeyCases, LetterCases, ReplayCases
from perdure.testing.contract.end_run import EndingCases
from perdure.testing.contract.fan_out import FanOutCases, ReturningCases
from perdure.testing.contract.finalization import DutyCases, ObservingCases
from perdure.testing.contract.history import HistoryCases
from perdure.testing.contract.inbox import MailCases
from perdure.testing.contract.queries import HintCases, ListCases, ValueCases
from perdure.testing.contract.rewind import RewindingCases
from perdure.testing.contract.streams import PublishedCases, StreamCases
from perdure.testing.contract.topics import PublishingCases, QueueCases
from perdure.testing.contract.workers import FleetCases

__all__ = ["StoreContract"]


class StoreContract(
    CreatingCases,
    TurnCases,
    HistoryCases,
    MailCases,
    EndingCases,
    ObservingCases,
    DutyCases,
    RewindingCases,
    FamilyCases,
    ForkCases,
    PublishingCases,
    QueueCases,
    FanOutCases,
    ReturningCases,
    StreamCases,
    PublishedCases,
    LetterCases,
    ReplayCases,
    KeyCases,
    FleetCases,
    ListCases,
    HintCases,
    ValueCases,
):
    """All cases of the contract."""
