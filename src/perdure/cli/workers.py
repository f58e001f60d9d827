"""Commands worker and workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli import options
from perdure.cli.output import age, coloured, literal, print_json, print_out, table_of
from perdure.cli.session import error_reporting, stop_event, with_client
from perdure.cli.settings import existing_store, find_settings, store_url

if TYPE_CHECKING:
    from perdure.worker import Worker
    from perdure.workflows.definition import Workflow


Pool = Annotated[
    str | None, typer.Option("--pool", "-p", metavar="NAME", help="The pool of this worker.", show_default="default")
]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", "-c", metavar="N", min=1, help="Maximum number of active runs.", show_default=False),
]

LifespanName = Annotated[
    str | None,
    typer.Option(
        "--lifespan",
        metavar="MODULE:NAME",
        help="Async context manager whose value steps read as current_step().state.",
        show_default=False,
    ),
]


def worker(
    target: options.Target = None,
    pool: Pool = None,
    concurrency: Concurrency = None,
    lifespan: LifespanName = None,
    grace: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", min=0, help="Time for running steps to finish after SIGTERM.")
    ] = 10.0,
    refuse_blocking: Annotated[
        bool,
        typer.Option("--refuse-blocking", help="Refuse blocking calls in workflow code, as `dev` does."),
    ] = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Execute runs until SIGTERM or SIGINT; then finish running steps and release the runs."""
    from perdure.cli.target import load_lifespan, load_unambiguous, parse_target
    from perdure.config import EngineConfig
    from perdure.worker import Worker

    with error_reporting(json):
        url, parsed = store_url(store), parse_target(target)
        workflows = load_unambiguous(parsed)
        loaded_lifespan = load_lifespan(lifespan, parsed)
        name = pool or find_settings().pool or "default"
        with _guard(refuse_blocking):
            _work(
                partial(Worker, url, workflows, name, concurrency, EngineConfig(grace=grace), loaded_lifespan),
                on_started=lambda: _announce(workflows, name, url, json=json),
            )
        if json:
            print_json({"worker": "stopped", "pid": os.getpid()}, indent=False)
        else:
            print_out("Worker stopped; runs released.")


def _guard(refuse_blocking: bool) -> AbstractContextManager[None]:
    """Return the guard against blocking calls. It is optional because it sees every audit event of the interpreter."""
    if not refuse_blocking:
        return nullcontext()
    from perdure.runner.blocking_guard import blocking_refused

    return blocking_refused()


def _work(make_worker: Callable[[], Worker], on_started: Callable[[], None]) -> None:
    """Run a worker until a signal stops it. `on_started` is called when it has joined."""
    import logging

    from perdure.execution.collector_settings import tune_collector
    from perdure.script import run_with_uvloop

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    async def main() -> None:
        stop = stop_event()
        tune_collector()  # all modules are imported by now
        await make_worker().run_until(stop, on_started)

    run_with_uvloop(main())


def _announce(workflows: list[Workflow[Any, Any]], pool: str, url: str, *, json: bool) -> None:
    from perdure.client.store_urls import redact_password

    pairs, store = sorted({(each.name, each.version) for each in workflows}), redact_password(url)
    if json:
        from perdure.cli.json_output import workflow_shape

        workflow_shapes = [workflow_shape(name, version) for name, version in pairs]
        shape = {"worker": "started", "pid": os.getpid(), "pool": pool, "store": store, "workflows": workflow_shapes}
        print_json(shape, indent=False)
        return
    names = ", ".join(name if version == 1 else f"{name} v{version}" for name, version in pairs)
    print_out(literal(f"Worker started (pid {os.getpid()}, pool {pool}, store {store}). Workflows: {names}"))


def workers(store: options.Store = None, json: options.Json = False) -> None:
    """List workers: their workflows, the number of their runs, and whether they are alive."""
    from perdure.admin.store_views import workers_of

    with error_reporting(json):
        found = with_client(existing_store(store_url(store)), workers_of)
        if json:
            from perdure.cli.json_output import worker_shape

            print_json({"workers": [worker_shape(each) for each in found]})
            return
        if not found:
            print_out("No workers found.")
            return
        colours = {"alive": "green", "dead": "red"}
        rows = [
            (
                each.id,
                coloured("alive" if each.alive else "dead", colours),
                each.pool,
                str(each.pid),
                str(each.runs),
                age(each.started_at),
                literal(", ".join(f"{name} v{version}" for name, version in each.workflows)),
            )
            for each in found
        ]
        headings = ("worker", "state", "pool", "pid", "runs", "started", "workflows")
        print_out(table_of(headings, rows, right=("pid", "runs")))
