"""Agents that draft and refine a text, and a person who has to approve it: `python human_approval.py`.

The workflow asks agents for a draft, for two opinions on it and for a better version, hands that to a reviewer together
with a token, and then waits, for minutes or for weeks; nothing needs to run meanwhile. Whoever has the token decides,
from wherever the store can be reached:

    python human_approval.py begin STORE FOLDER TASK    work until the reviewer has the text; it is put into FOLDER
    python human_approval.py approve STORE TOKEN NOTES  what the reviewer does
    python human_approval.py reject STORE TOKEN NOTES
    python human_approval.py finish STORE FOLDER TASK   work until there is a result

Without arguments the program plays all parts, in three processes that share nothing but a SQLite file: one works up to
the gate and ends, one approves while nobody works, one does the rest.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from perdure import Client, Context, Engine, InvalidToken, current_step, step, workflow

DESK = "desk.json"  # in the reviewer's folder: the text to be reviewed, and the token that decides


@dataclass
class Review:
    approved: bool
    notes: str


@dataclass
class Assignment:
    task: str
    desk: str  # the reviewer's folder; a real one would be an address


# --- the steps: agents, and the way to the reviewer ----------------------------------------------------------------


@step
async def draft_agent(task: str) -> str:
    return await ask_model(f"draft of {task!r}")


@step
async def critic_agent(subject: str, draft: str) -> str:
    return await ask_model(f"opinion on the {subject} of a {draft}")


@step
async def refine_agent(draft: str, opinions: dict[str, str]) -> str:
    return await ask_model(f"{draft}, refined by {len(opinions)} opinions")


@step
async def finalize_agent(refined: str, notes: str) -> str:
    return await ask_model(f"{refined}, final after {notes!r}")


@step
def notify_reviewer(desk: str, text: str, token: str) -> None:
    """Stands for an e-mail or a page with two buttons. The token is all that a decision needs."""
    Path(desk, DESK).write_text(json.dumps({"text": text, "token": token}))
    print("  notify_reviewer", flush=True)


async def ask_model(answer: str) -> str:
    """Stands for a call of a model: slow, expensive, and different each time. Recorded, it is made once."""
    await asyncio.sleep(0.1)
    print(f"  {current_step().location}", flush=True)
    return answer


# --- the workflow --------------------------------------------------------------------------------------------------


@workflow(idempotency_key=lambda assignment: assignment.task)
async def reviewed_text(ctx: Context, assignment: Assignment) -> str:
    draft = await draft_agent(assignment.task)
    opinions = await ctx.join(
        style=critic_agent("style", draft),
        facts=critic_agent("facts", draft),
        name="critics",
    )
    refined = await refine_agent(draft, opinions)

    gate = ctx.deferred("review", Review)
    await notify_reviewer(assignment.desk, refined, gate.token)
    review = await gate

    if not review.approved:
        return f"rejected: {review.notes}"
    return await finalize_agent(refined, review.notes)


# --- who works, and who decides ------------------------------------------------------------------------------------


async def begin(url: str, desk: str, task: str) -> None:
    async with Engine(url, [reviewed_text]) as engine:
        run = await engine.start(reviewed_text, Assignment(task, desk))
        async for entry in run.watch():
            if entry.name == "notify_reviewer" and entry.status == "succeeded":
                print(f"the reviewer has {task!r}")
                return
        await run.result()  # it has ended before it came to that: this says with which error


async def finish(url: str, desk: str, task: str) -> None:
    """Starting the same task again is no second run: it is the one that `begin` has begun."""
    async with Engine(url, [reviewed_text]) as engine:
        print(await engine.execute(reviewed_text, Assignment(task, desk)))


async def decide(url: str, token: str, review: Review) -> None:
    """All that it takes to decide: the store, and a token. No workflow code is executed here."""
    async with Client(url) as client:
        try:
            first = await client.complete(token, review)
        except InvalidToken as error:
            sys.exit(f"refused: {error}")
    print(("approved" if review.approved else "rejected") if first else "too late: this was decided before")


def play(folder: Path) -> None:
    url, task = f"sqlite:///{folder / 'runs.db'}", "the home page"
    print("One process works until a person is needed:")
    in_a_process("begin", url, str(folder), task)
    token = json.loads((folder / DESK).read_text())["token"]
    print("It has ended. Another one is the reviewer:")
    in_a_process("approve", url, token, "shorter, please")
    print("A third one does the rest:")
    in_a_process("finish", url, str(folder), task)


def in_a_process(*arguments: str) -> None:
    subprocess.run([sys.executable, __file__, *arguments], check=True)


def main(arguments: list[str]) -> None:
    match arguments:
        case []:
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # in step with the processes started
            with tempfile.TemporaryDirectory(prefix="perdure-review-") as folder:
                play(Path(folder).resolve())
        case ["begin", url, desk, task]:
            asyncio.run(begin(url, desk, task))
        case ["finish", url, desk, task]:
            asyncio.run(finish(url, desk, task))
        case ["approve" | "reject" as verdict, url, token, notes]:
            asyncio.run(decide(url, token, Review(verdict == "approve", notes)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
