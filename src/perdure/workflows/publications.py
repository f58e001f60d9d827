"""PublishedWorkflow: what a process must know of a workflow to start it by name, without importing it.

Workers store one document per workflow and version. This module builds and reads it; it knows no store.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from perdure.codec import JSON
from perdure.codec.payload_schema import find_schema_mismatch, payload_schema
from perdure.errors import InvalidPayload
from perdure.model.tags import TagValue, decode_tags, encode_tags
from perdure.workflows.definition import Workflow
from perdure.workflows.work_queues import WorkQueue

KIND = "workflow"
"""The kind of the documents."""


class PublishedWorkflow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a document: the JSON schema of the payload, and options that a start applies. Times in seconds."""

    parameters: dict[str, Any]
    timeout: float | None = None
    retention: float | None = None
    tags: msgspec.Raw = msgspec.Raw(b"{}")
    pool: str = "default"
    queue: str | None = None
    has_idempotency_key: bool = False

    def read_tags(self) -> dict[str, TagValue]:
        """Return the tags of the workflow."""
        return decode_tags(bytes(self.tags))

    def check_payload(self, payload: dict[str, Any], what: str) -> None:
        """Raise `InvalidPayload` if the payload does not match the schema. The worker checks the rest."""
        mismatch = find_schema_mismatch(self.parameters, JSON.decode(JSON.encode(payload, what=what)))
        if mismatch is not None:
            path, reason = mismatch[0].lstrip("."), mismatch[1]
            raise InvalidPayload(f"{what}: {path}: {reason}" if path else f"{what}: {reason}")


def publish_workflow(workflow: Workflow[Any, Any]) -> PublishedWorkflow:
    """Return what is published of a workflow."""
    settings = workflow.settings
    queue = settings.queue.name if isinstance(settings.queue, WorkQueue) else settings.queue
    return PublishedWorkflow(
        parameters=payload_schema(workflow.parameters),
        timeout=settings.timeout,
        retention=settings.retention,
        tags=msgspec.Raw(encode_tags(settings.tags)),
        pool=settings.pool,
        queue=queue,
        has_idempotency_key=settings.idempotency_key is not None,
    )


def document_id(name: str, version: int) -> str:
    """Return the id of the document of a workflow."""
    return f"{name}@{version}"


def encode_publication(published: PublishedWorkflow) -> bytes:
    """Return the body of a document; equal for equal values."""
    return msgspec.json.encode(published, order="deterministic")


def decode_publication(body: bytes) -> PublishedWorkflow:
    """Return what a document contains."""
    return msgspec.json.decode(body, type=PublishedWorkflow)


UNPUBLISHED = PublishedWorkflow(parameters={})
"""Of a workflow without a document: an older worker has it."""
