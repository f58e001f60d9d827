"""An AI agent that calls tools, streams its text and needs approval for what cannot be undone: `python agent_loop.py`.

Each model call and each tool call is a step: after a crash the agent continues with the recorded responses, and no
expensive call is made twice. The model's text is written to a stream, token by token, which any process can follow. A
dangerous tool waits for a person: the run is suspended meanwhile, for minutes or weeks.

The model here is a script without a network. Replace the body of `call_model` by a call of your provider.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from perdure import Context, Engine, current_step, event, step, workflow

DANGEROUS = {"delete_files"}


@event
class Approval:
    approved: bool


@dataclass
class ToolCall:
    tool: str
    argument: str


@dataclass
class Message:
    role: str
    text: str
    calls: list[ToolCall] = field(default_factory=list)


# --- steps: the model and its tools ---------------------------------------------------------------------------------

SCRIPT = [
    Message("assistant", "I look at the folder first.", [ToolCall("list_files", "logs")]),
    Message("assistant", "Two logs are old. I delete them.", [ToolCall("delete_files", "logs/*.old")]),
    Message("assistant", "The folder is clean."),
]


@step
async def call_model(messages: list[Message]) -> Message:
    """Return the next message of the model, and stream its text meanwhile."""
    response = SCRIPT[sum(message.role == "assistant" for message in messages)]
    for token in response.text.split():
        current_step().write("tokens", token)
        await asyncio.sleep(0.001)
    return response


@step
async def list_files(folder: str) -> str:
    return f"{folder}: today.log, monday.old, sunday.old"


@step
async def delete_files(pattern: str) -> str:
    return f"deleted {pattern}"


TOOLS: dict[str, Callable[[str], Awaitable[str]]] = {"list_files": list_files, "delete_files": delete_files}


# --- workflow --------------------------------------------------------------------------------------------------------


@workflow
async def agent(ctx: Context, task: str) -> list[Message]:
    messages = [Message("user", task)]
    while True:
        response = await call_model(messages)
        messages.append(response)
        if not response.calls:
            return messages
        messages += [Message("tool", await use_tool(ctx, call)) for call in response.calls]


async def use_tool(ctx: Context, call: ToolCall) -> str:
    if call.tool in DANGEROUS:
        await ctx.publish("needs_approval", f"{call.tool}({call.argument})")
        if not (await ctx.receive(Approval)).approved:
            return "the user did not approve"
    tool = TOOLS[call.tool]
    return await tool(call.argument)


# --- program ---------------------------------------------------------------------------------------------------------


async def main() -> None:
    async with Engine("sqlite:///agent.db") as engine:
        run = await engine.start(agent, "Clean up the logs.", id="agent-1")
        if run.created:
            await engine.send(run.id, Approval(approved=True))  # a person's decision may come early
        print("tokens:", " ".join([token async for token in engine.read_stream(run.id, "tokens")]))
        print("approved:", (await engine.published(run.id))["needs_approval"])
        for message in await run.result():
            print(f"{message.role}: {message.text}")


if __name__ == "__main__":
    asyncio.run(main())
