"""Output at a terminal: colours, table widths, progress bars, confirmations, live views."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time

import pytest

from tests.cli.cli_runner import TIMEOUT_SECONDS

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLUMNS = 90


class Terminal:
    """A `perdure` process at a pseudo-terminal."""

    def __init__(self, shop, *args: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**shop.environment, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "40"}
        self.process = subprocess.Popen(
            shop.command(*args),
            cwd=shop.folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.seen = ""

    def until(self, text: str) -> None:
        """Read until this text was printed."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while text not in CONTROL.sub("", self.seen):
            assert time.monotonic() < deadline, self.seen
            assert self._read(), f"{text!r} was not printed: {self.seen}"

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Read to the end and return the exit code."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self._read():
            assert time.monotonic() < deadline, self.seen[-2000:]
        os.close(self._master)
        return self.process.wait(TIMEOUT_SECONDS)

    @property
    def text(self) -> str:
        """The printed text without control sequences."""
        return CONTROL.sub("", self.seen).replace("\r", "")

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], TIMEOUT_SECONDS)
        assert ready, f"nothing more came: {self.seen}"
        try:
            more = os.read(self._master, 65_536)
        except OSError:  # the program has ended, and with it the terminal
            return False
        self.seen += more.decode(errors="replace")
        return bool(more)


def _take_terminal() -> None:
    """In the child: take the terminal and reset SIGINT, so that Ctrl+C works even if the test runner ignores it."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def terminal(shop):
    opened = []

    def open_one(*args: str) -> Terminal:
        opened.append(Terminal(shop, *args))
        return opened[-1]

    yield open_one
    for each in opened:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGKILL)
            each.process.wait()


def test_ls_is_coloured_and_fits_the_width(shop, terminal):
    shop.start("review", f'["{"long " * 40}"]', "--id", "a-run-with-a-rather-long-id", "--tag", "x=y")
    shop.run("cancel", "a-run-with-a-rather-long-id")
    shown = terminal("ls")
    assert shown.end() == 0
    assert COLOUR.search(shown.seen)
    assert "a-run-with-a-rather-long-id" in shown.text
    assert max(map(len, shown.text.splitlines())) <= COLUMNS


def test_show_is_coloured_and_hides_the_traceback(shop, terminal):
    with shop.worker():
        shop.start("checkout", '{"id": "1", "cents": -1}', "--id", "bad")
        shop.until("bad", "failed")
    shown = terminal("show", "bad")
    assert shown.end() == 0
    assert "\x1b[1;31mfailed" in shown.seen, "bold and red"
    assert "\x1b[31m━" in shown.seen, "the bar is red"
    assert "use --trace" in shown.text
    assert max(map(len, shown.text.splitlines())) <= COLUMNS


def test_errors_are_coloured_and_name_the_next_command(terminal):
    refused = terminal("show", "unknown")
    assert refused.end() == 3
    assert "\x1b[1;31merror" in refused.seen
    assert "try: perdure ls --prefix unknown" in refused.text


def test_cancel_of_several_runs_asks_for_confirmation(shop, terminal):
    for name in ("a", "b"):
        shop.start("naps", None, "--id", name)
    refusing = terminal("cancel", "a", "b")
    refusing.until("Cancel these 2 runs?")
    refusing.type("n\n")
    assert refusing.end() == 2
    assert {run["status"] for run in shop.json("ls")["runs"]} == {"pending"}
    agreeing = terminal("cancel", "--workflow", "naps")
    agreeing.until("Cancel these 2 runs?")
    agreeing.type("y\n")
    assert agreeing.end() == 0
    assert "Cancellation requested for 2 runs" in agreeing.text
    assert {run["status"] for run in shop.json("ls")["runs"]} == {"cancelled"}


def test_check_shows_a_progress_bar_and_clears_it(shop, terminal):
    for name in ("a", "b"):
        shop.start("naps", None, "--id", name)
    checking = terminal("check", "shop")
    assert checking.end() == 0
    assert "replay" in checking.text
    assert "━" in checking.text
    assert checking.text.rstrip().endswith("2 open runs are compatible with this code")


def test_watch_updates_until_the_run_ends(shop, terminal):
    with shop.worker():
        shop.start("checkout", '{"id": "1", "cents": 5}', "--id", "order")
        shop.until("order", "suspended")
        watching = terminal("watch", "order")
        watching.until("waiting for")
        watching.until("event Approved")
        shop.run("send", "order", "Approved", '{"by": "ada"}')
        watching.until("receipt-1 approved by ada")
        assert watching.end() == 0
    assert "\x1b[?25l" in watching.seen, "the cursor is hidden during the live view"
    assert "\x1b[?25h" in watching.seen, "the cursor is restored"


def test_ctrl_c_ends_watch_but_not_the_run(shop, terminal):
    shop.start("naps", None, "--id", "nap")
    watching = terminal("watch", "nap")
    watching.until("waiting for")
    watching.type("\x03")
    assert watching.end() == 130
    assert shop.json("show", "nap")["run"]["status"] == "pending"
