"""Wait for a person to approve a text that agents drafted and refined: `python human_approval.py`.

The workflow calls agents for a draft, two reviews and a refined version. It sends the refined version to a reviewer
together with a token. Then it waits, for minutes or weeks; no process needs to run. Any process that can reach the
store can decide with the token:

    python human_approval.py begin STORE FOLDER TASK    execute until the reviewer has the text, as a file in FOLDER
    python human_approval.py approve STORE TOKEN NOTES  approve the text
    python human_approval.py reject STORE TOKEN NOTES   reject the text
    python human_approval.py finish STORE FOLDER TASK   execute until the run has a result

Without arguments the program starts three processes that share only a SQLite file. The first executes the run until it
waits for the reviewer, and exits. The second approves while no worker runs. The third finishes the run.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from perdure import Client, Context, Engine, InvalidToken, current_step, step, workflow

REVIEW_FILE = "review.json"  # in the reviewer's folder: the text to review, and the token to decide with


@dataclass
class Review:
    approved: bool
    notes: str


@dataclass
class Assignment:
    task: str
    reviewer: str  # the reviewer's folder; in production an e-mail address


# --- steps: calls of agents, and the notification of the reviewer ---------------------------------------------------


@step
async def draft_agent(task: str) -> str:
    return await call_model(f"draft of {task!r}")


@step
async def critic_agent(subject: str, draft: str) -> str:
    return await call_model(f"review of the {subject} of a {draft}")


@step
async def refine_agent(draft: str, reviews: dict[str, str]) -> str:
    return await call_model(f"{draft}, refined by {len(reviews)} reviews")


@step
async def finalize_agent(refined: str, notes: str) -> str:
    return await call_model(f"{refined}, final after {notes!r}")


@step
def notify_reviewer(reviewer: str, text: str, token: str) -> None:
    """Simulate an e-mail or a page with two buttons. A decision needs only the token."""
    Path(reviewer, REVIEW_FILE).write_text(json.dumps({"text": text, "token": token}))
    print("  notify_reviewer", flush=True)


async def call_model(response: str) -> str:
    """Simulate a model call: slow, expensive and not repeatable. The step records the response, so it is made once."""
    await asyncio.sleep(0.1)
    print(f"  {current_step().location}", flush=True)
    return response


# --- workflow -------------------------------------------------------------------------------------------------------


@workflow(idempotency_key=lambda assignment: assignment.task)
async def reviewed_text(ctx: Context, assignment: Assignment) -> str:
    draft = await draft_agent(assignment.task)
    reviews = await ctx.join(
        style=critic_agent("style", draft),
        facts=critic_agent("facts", draft),
        name="critics",
    )
    refined = await refine_agent(draft, reviews)

    decision = ctx.deferred("review", Review)
    await notify_reviewer(assignment.reviewer, refined, decision.token)
    review = await decision

    if not review.approved:
        return f"rejected: {review.notes}"
    return await finalize_agent(refined, review.notes)


# --- the commands ---------------------------------------------------------------------------------------------------


async def begin(url: str, reviewer: str, task: str) -> None:
    """Execute the run until the reviewer has the text."""
    async with Engine(url, [reviewed_text]) as engine:
        run = await engine.start(reviewed_text, Assignment(task, reviewer))
        async for entry in run.watch():
            if entry.name == "notify_reviewer" and entry.status == "succeeded":
                print(f"the reviewer has {task!r}")
                return
        await run.result()  # the run ended before the notification: raise its error


async def finish(url: str, reviewer: str, task: str) -> None:
    """Execute the run of `begin` to its end. The idempotency key identifies it: no second run is created."""
    async with Engine(url, [reviewed_text]) as engine:
        print(await engine.execute(reviewed_text, Assignment(task, reviewer)))


async def decide(url: str, token: str, review: Review) -> None:
    """Complete the deferred with a decision. This needs the store and a token, and executes no workflow code."""
    async with Client(url) as client:
        try:
            first = await client.complete(token, review)
        except InvalidToken as error:
            sys.exit(f"rejected token: {error}")
    print(("approved" if review.approved else "rejected") if first else "already decided")


def run_demo(folder: Path) -> None:
    url, task = f"sqlite:///{folder / 'runs.db'}", "the home page"
    print("First process, until the run needs a decision:")
    run_process("begin", url, str(folder), task)
    token = json.loads((folder / REVIEW_FILE).read_text())["token"]
    print("It has exited. Second process, the reviewer:")
    run_process("approve", url, token, "shorter, please")
    print("Third process, which finishes the run:")
    run_process("finish", url, str(folder), task)


def run_process(*arguments: str) -> None:
    subprocess.run([sys.executable, __file__, *arguments], check=True)


def main(arguments: list[str]) -> None:
    match arguments:
        case []:
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # ordered with child output
            with tempfile.TemporaryDirectory(prefix="perdure-review-") as folder:
                run_demo(Path(folder).resolve())
        case ["begin", url, reviewer, task]:
            asyncio.run(begin(url, reviewer, task))
        case ["finish", url, reviewer, task]:
            asyncio.run(finish(url, reviewer, task))
        case ["approve" | "reject" as decision, url, token, notes]:
            asyncio.run(decide(url, token, Review(decision == "approve", notes)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
