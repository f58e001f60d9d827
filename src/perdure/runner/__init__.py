"""The pure core: interpret a workflow. History and inputs go in, a `Turn` comes out.

The package knows no clock, no store, no network and no other run. Read it in the order of control flow:

    runner.py           Runner.advance(now, inputs) -> Turn: replay, then inputs, then the turn
    state.py            RunnerState, which the collaborators below share; RunStart, what a run is replayed from
    inputs.py           InputApplier: step results, messages and due timers
    completions.py      CompletionApplier: one completion at a time, with a drain of the loop after each
    function_end.py     FunctionEnd: the outcome of the workflow function, and the start of its cleanup
    context_api.py      ContextApi: the calls that user code makes while the loop drains
    turn_builder.py     TurnBuilder: effects to start, waits, wake-up time

    entry_tracker.py    EntryTracker: requested entries, compared with history.py; versioning.py: version gates
    event_loop.py       WorkflowLoop, with tasks.py, timers.py, scopes.py and asyncio_internals.py
    eviction.py         dropping a run from memory
"""
