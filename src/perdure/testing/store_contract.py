"""The suite that every store passes: subclass `StoreContract`, implement how to make your store, and run pytest.

    class TestMyStore(StoreContract):
        async def make_store(self):
            return MyStore(...)           # new and empty, not yet open

        async def again(self, store):
            return MyStore(same data)     # a second handle; for a store in memory, `store` itself

Every guarantee of `perdure.stores.protocol` has a case here: rejected and repeated writes, races through two handles,
lost results, wake-ups, pages and values. Cases are plain methods that run their own event loop; no plugin is needed.
"""

from __future__ import annotations

from perdure.testing.contract.children_and_forks import ChildrenCases, ForkCases
from perdure.testing.contract.commit_turn import CommitTurnCases
from perdure.testing.contract.create_run import CreateRunCases
from perdure.testing.contract.dead_letters import DeadLetterCases, KeyCases, ReplayCases
from perdure.testing.contract.delete_run import DeleteRunCases
from perdure.testing.contract.documents import DocumentCases
from perdure.testing.contract.end_run import EndRunCases
from perdure.testing.contract.fan_out import FanOutCases, ReleaseCases
from perdure.testing.contract.filters import FilterCases, FilterPageCases, QueueFilterCases
from perdure.testing.contract.finalization import FinalizationCases, ObserverCases
from perdure.testing.contract.followers import FollowerCases
from perdure.testing.contract.history import HistoryCases
from perdure.testing.contract.inbox import InboxCases
from perdure.testing.contract.lists import ListCases
from perdure.testing.contract.mailbox_limits import MailboxLimitCases
from perdure.testing.contract.queries import ChangeHintCases, QueryCases, ValueCases
from perdure.testing.contract.queue_admission import AdmitCases, ConcurrentAdmissionCases
from perdure.testing.contract.queue_claims import QueueClaimCases, QueueHintCases
from perdure.testing.contract.queue_departure import DepartureCases, QueuedRewindCases
from perdure.testing.contract.queue_duplicates import DebounceCases, DedupeCases
from perdure.testing.contract.queue_partitions import PartitionCases
from perdure.testing.contract.queue_traces import QueueTraceCases
from perdure.testing.contract.queue_waiting import QueueWaitingCases
from perdure.testing.contract.queues import PlaceCases, QueueMoveCases, QueueSettingsCases
from perdure.testing.contract.replace_run import ReplaceRunCases
from perdure.testing.contract.rewind import RewindCases
from perdure.testing.contract.streams import PublishedCases, StreamCases
from perdure.testing.contract.tags import TagCases
from perdure.testing.contract.topics import PublishCases, TopicQueueCases
from perdure.testing.contract.waiting_runs import WaitingRunCases
from perdure.testing.contract.workers import WorkerCases

__all__ = ["ContractWithoutQueues", "StoreContract"]


class ContractWithoutQueues(
    CreateRunCases,
    ReplaceRunCases,
    CommitTurnCases,
    HistoryCases,
    InboxCases,
    MailboxLimitCases,
    EndRunCases,
    DeleteRunCases,
    ObserverCases,
    FinalizationCases,
    RewindCases,
    ChildrenCases,
    ForkCases,
    PublishCases,
    TopicQueueCases,
    FanOutCases,
    ReleaseCases,
    StreamCases,
    PublishedCases,
    DeadLetterCases,
    ReplayCases,
    KeyCases,
    WorkerCases,
    QueryCases,
    WaitingRunCases,
    TagCases,
    FilterCases,
    FilterPageCases,
    ListCases,
    DocumentCases,
    ChangeHintCases,
    FollowerCases,
    ValueCases,
):
    """All cases for a store that refuses to declare queues."""


class StoreContract(
    ContractWithoutQueues,
    QueueFilterCases,
    QueueSettingsCases,
    PlaceCases,
    QueueMoveCases,
    AdmitCases,
    ConcurrentAdmissionCases,
    DepartureCases,
    QueuedRewindCases,
    QueueWaitingCases,
    DedupeCases,
    DebounceCases,
    PartitionCases,
    QueueClaimCases,
    QueueHintCases,
    QueueTraceCases,
):
    """All cases of the contract."""
