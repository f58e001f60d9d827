"""Every command with hostile arguments: an error message and an exit code, never a traceback, and nothing is stored."""

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perdure import Client, Context, Engine, RunQuery, workflow
from perdure.cli import app as command_tree
from perdure.cli.dead_letters import dead_letters

TEXTS = ("", "\udcff", "x" * 100_000, "[red]\n")
JSONS = (
    *("", "{", "\udcff", "NaN", '"\\ud800"', "9" * 5000, "-"),
    *("[" * 20_000 + "]" * 20_000, "[" * 300 + "]" * 300),
)
TIMES = ("", "soon", "9" * 400 + "d", "9" * 400, "nan", "1e400", "\udcff", "0001-01-01T00:00+23:59")
NUMBERS = ("", "-1", "9" * 5000, "nan", "\udcff")
TARGETS = (*(each for each in TEXTS if len(each) < 100), "nothing:at_all", ":x", "x.py", "..", "os:path")
FILES = (
    *("", "-", "nothing.json", ".", "/", "x" * 300, "\udcff"),
    *("bad.json", "deep.json", "latin.json", "list.json", "odd.json"),
)
HOSTILE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("id", "ids", "location", "event", "topic", "event_id", "new_id", "parent", "prefix"), TEXTS),
    **dict.fromkeys(("token", "message", "kind", "to", "after", "workflow", "tag", "status", "pool", "name"), TEXTS),
    **dict.fromkeys(("payload", "value"), JSONS),
    **dict.fromkeys(("since", "until", "delay", "timeout", "max_wait"), TIMES),
    **dict.fromkeys(("limit", "concurrency", "grace", "priority"), NUMBERS),
    **dict.fromkeys(("target", "app", "lifespan"), TARGETS),
    **dict.fromkeys(("file", "output"), FILES),
    "store": ("\udcff", "sqlite:///%00", "sqlite:///" + "x" * 5000),
    **dict.fromkeys(("reason", "held", "waiting_for", "if_exists"), TEXTS),
    **dict.fromkeys(("queue", "partition", "dedupe", "on_duplicate"), TEXTS),
    "query": (
        "\udcff",
        "x" * 100_000,
        "amount>",
        "a:b OR",
        "((((((((((a:b))))))))))",
        'x:"',
        "created>soon",
        "held:odd",
    ),
    "send": (*TEXTS, *(f"topic={each}" for each in JSONS), "=1"),
}
VALID = {
    "id": "known",
    "location": "work",
    "event": "topic",
    "topic": "topic",
    "token": "x",
    "message": "m",
    "name": "x",
    "file": "list.json",
}
FLAGS = ("json", "yes", "trace", "wait", "repair", "deep", "refuse_blocking", "lint")
LONG_RUNNING = ("dev", "demo")  # tested by their own files; their options are those of `worker`


@workflow(name="cli_hostile.waits")
async def waits(ctx: Context) -> None:
    await ctx.receive("never")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a store that has one run, and files that are no exports."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 20_000 + "]" * 20_000)
    (tmp_path / "latin.json").write_bytes(b'{"run": "\xff"}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "odd.json").write_text('{"perdure": 1, "run": {"id": 5}, "entries": {"a": 1}}')

    async def main() -> None:
        async with Engine("sqlite:///store.db?synchronous=off", [waits]) as engine:
            await engine.start(waits, id="known")

    asyncio.run(main())
    monkeypatch.setenv("PERDURE_STORE", "sqlite:///store.db?synchronous=off")
    return tmp_path


def commands() -> Iterator[tuple[list[str], Any]]:
    for group in command_tree.COMMANDS.values():
        for name, function in group.items():
            if name not in LONG_RUNNING:
                yield [name], function
    for command in dead_letters.registered_commands:
        yield ["dead-letters", str(command.name)], command.callback


def hostile_invocations(name: list[str], function: Any) -> Iterator[list[str]]:
    """Yield the arguments of a command, each time with one hostile value."""
    parameters = inspect.signature(function, eval_str=True).parameters
    for parameter in parameters:
        for value in () if parameter in FLAGS else HOSTILE[parameter]:
            words, options = list(name), []
            for other, definition in parameters.items():
                given = value if other == parameter else VALID.get(other)
                info = definition.annotation.__metadata__[0]
                if type(info).__name__ == "ArgumentInfo":
                    words += [] if given is None else [given]
                elif other == parameter:
                    name_of_option = next(each for each in (info.default, *info.param_decls) if each.startswith("--"))
                    options = [f"{name_of_option}={value}"]
            yield [*words[: len(name)], *options, "--", *words[len(name) :]]


async def stored(client: Client) -> Any:
    store = client._session.store
    return [each.id for each in (await store.runs(RunQuery())).runs], await store.load(["known"])


def read_store() -> Any:
    async def main() -> Any:
        async with Client("sqlite:///store.db?synchronous=off") as client:
            return await stored(client)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "function"), list(commands()), ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_command_reports_hostile_arguments_and_stores_nothing(folder, name, function):
    before = read_store()
    failures = []
    for arguments in hostile_invocations(name, function):
        done = CliRunner().invoke(command_tree.app, arguments, input=b"\xff{")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            failures.append((arguments[:6], type(done.exception).__name__, str(done.exception)[:200]))
        elif done.exit_code not in range(5):
            failures.append((arguments[:6], f"exit code {done.exit_code}", done.output[:200]))
    shown = [tuple(repr(each)[:120] for each in failure) for failure in failures]
    assert shown == []
    if name[0] not in ("send", "emit", "cancel", "terminate", "resume", "rewind", "fork"):  # some values are valid
        assert read_store() == before
