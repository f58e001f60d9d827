"""The suite that every store passes: subclass `StoreContract`, say how to make your store, and run pytest.

    class TestMyStore(StoreContract):
        async def make_store(self):
            return MyStore(...)           # new and empty, not yet open

        async def again(self, store):
            return MyStore(same data)     # a second handle; for a store in memory, `store` itself

Every promise of `perdure.store.base` has a case here: what is refused and what is recognised, races through two
handles, lost answers, wake-ups, pages, and values. Cases are plain methods that run their own event loop; no plugin is
needed.
"""

from __future__ import annotations

from perdure.testing.contract.creating import CreatingCases
from perdure.testing.contract.duties import DutyCases, ObservingCases
from perdure.testing.contract.ending import EndingCases
from perdure.testing.contract.families import FamilyCases, ForkCases
from perdure.testing.contract.fanning import FanOutCases, ReturningCases
from perdure.testing.contract.fleet import FleetCases
from perdure.testing.contract.histories import HistoryCases
from perdure.testing.contract.letters import KeyCases, LetterCases, ReplayCases
from perdure.testing.contract.mail import MailCases
from perdure.testing.contract.queries import HintCases, ListCases, ValueCases
from perdure.testing.contract.rewinding import RewindingCases
from perdure.testing.contract.streams import PublishedCases, StreamCases
from perdure.testing.contract.topics import PublishingCases, QueueCases
from perdure.testing.contract.turns import TurnCases

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
