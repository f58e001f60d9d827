"""No error, output or log shows a password, whatever is wrong with the URL of the store."""

import asyncio
import itertools
import logging
import traceback

import pytest
from typer.testing import CliRunner

from perdure import Client, Engine, Worker
from perdure.cli.app import app
from perdure.client.store_urls import open_store, redact_password
from perdure.clock import SYSTEM_CLOCK
from perdure.errors import InvalidArgument, StoreError
from perdure.stores.postgres.url import parse_url as parse_postgres_url
from perdure.stores.redis.server import parse_url as parse_redis_url

SECRET = "hunter2"
SCHEMES = ("postgresql", "postgres", "redis", "rediss", "redis+unix", "sqlite", "memory", "mysql", "")
PASSWORDS = [
    f"{before}{SECRET}{after}"
    for before, after in itertools.product(
        ("", "a/", "1/", "?", "#", "@", ":", "%"), ("", "/x", "#x", "?x", "%", "[", " ")
    )
]
PLACES = ("bob:{}@h/db", ":{}@h/0", "bob:{}@h:port/db", "bob:{}@h:99999/db", "bob:{}", "bob:{}/db", "h/db?password={}")
URLS = [
    f"{scheme}{'://' if scheme else ''}{place.format(password)}"
    for scheme, password, place in itertools.product(SCHEMES, PASSWORDS, PLACES)
    # `bob:1/hunter2` and `bob:@hunter2` are correct: a host with a port and a database, a login and a host.
    if "@" in place or "?" in place or not password.startswith(("1/", "@"))
]


def texts_of(error: BaseException | None) -> str:
    """Return all that is shown of an error, with its causes and contexts, also suppressed ones."""
    found = []
    while error is not None:
        found += [str(error), repr(error), *traceback.format_exception(error)]
        error = error.__cause__ or error.__context__
    # A traceback quotes the source, in which this test's parameters are no literals.
    return "\n".join(found)


def shown_when_opened(url: str) -> str:
    try:
        return repr(open_store(url, SYSTEM_CLOCK))
    except InvalidArgument as error:
        return texts_of(error)


def test_no_url_is_shown_with_its_password():
    for url in URLS:
        assert SECRET not in redact_password(url), url


def test_no_error_about_a_url_shows_its_password():
    for url in URLS:
        assert SECRET not in shown_when_opened(url), url
    assert "'" + SECRET not in repr(parse_postgres_url(f"postgresql://bob:{SECRET}@h/db"))
    assert SECRET not in repr(parse_redis_url(f"redis://:{SECRET}@h/0"))


@pytest.mark.parametrize("kind", [Engine, Client, Worker])
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://bob:hunter2/x@h/db",
        "postgresql://bob:hunter2#x@h/db",
        "postgresql://bob:hunter2?x@h/db",
        "postgresql://bob:12/hunter2@h/db",
        "postgresql://bob:hunter2@h:port/db",
        "redis://:hunter2/x@h/0",
        "redis://:hunter2#x@h/0",
        "postgres+asyncpg://bob:hunter2@h/db",
    ],
)
def test_url_with_a_mistake_is_refused_with_advice_and_without_the_password(kind, url):
    with pytest.raises(InvalidArgument) as caught:
        kind(url)
    assert SECRET not in texts_of(caught.value)
    assert "%" in str(caught.value) or "use one of" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://bob:hunter2%zz@127.0.0.1:1/db",
        "postgresql://bob:hunter2%00@127.0.0.1:1/db",
        "postgresql://127.0.0.1:1/db?user=bob&password=hunter2&sslpassword=hunter2",
        "redis://:hunter2%2Fx@127.0.0.1:1/0",
    ],
)
def test_failed_connection_shows_no_password(url, caplog):
    async def main() -> None:
        with pytest.raises(StoreError) as caught:
            await open_store(url, SYSTEM_CLOCK).open(shards=8)
        messages = []
        error: BaseException | None = caught.value
        while error is not None:
            messages += [str(error), repr(error)]
            error = error.__cause__ or error.__context__
        assert SECRET not in "".join(messages)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    assert SECRET not in caplog.text


COMMANDS = [
    *(["ls"], ["show", "x"], ["watch", "x"], ["start", "shop"], ["send", "x", "e"], ["emit", "e"], ["cancel", "x"]),
    *(["terminate", "x"], ["resume", "x"], ["rewind", "x", "y"], ["fork", "x", "y"], ["export", "x"], ["workers"]),
    *(["complete", "t"], ["fail", "t", "m"], ["doctor"], ["migrate"], ["prune"], ["dead-letters", "ls"]),
    *(["dead-letters", "show", "1"], ["dead-letters", "replay", "1"], ["dead-letters", "rm", "1"]),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_with_an_invalid_url_exits_with_2_and_shows_no_password(command):
    for url in (
        "postgresql://bob:hunter2/x@h/db",
        "redis://:hunter2#x@h/0",
        "mysql://bob:hunter2@h/db",
    ):
        for given, environment in ((["--store", url], {}), (["--json"], {"PERDURE_STORE": url})):
            done = CliRunner().invoke(app, [*command, *given], env=environment)
            assert done.exit_code == 2, done.output
            assert isinstance(done.exception, SystemExit)
            assert SECRET not in done.output + done.stderr
