"""At a terminal: colours, tables that fit, bars while something takes long, questions, and a picture that moves."""

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

from tests.cli.cli_runner import PATIENCE

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLUMNS = 90


class Terminal:
    """A program at a terminal of its own."""

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

    def until(self, words: str) -> None:
        """Read until these words were printed."""
        deadline = time.monotonic() + PATIENCE
        while words not in CONTROL.sub("", self.seen):
            assert time.monotonic() < deadline, self.seen
            assert self._read(), f"{words!r} never came: {self.seen}"

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + PATIENCE
        while self._read():
            assert time.monotonic() < deadline, self.seen[-2000:]
        os.close(self._master)
        return self.process.wait(PATIENCE)

    @property
    def text(self) -> str:
        """What was printed, without colours and other control."""
        return CONTROL.sub("", self.seen).replace("\r", "")

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], PATIENCE)
        assert ready, f"nothing more came: {self.seen}"
        try:
            more = os.read(self._master, 65_536)
        except OSError:  # the program has ended, and with it the terminal
            return False
        self.seen += more.decode(errors="replace")
        return bool(more)


def _take_terminal() -> None:
    """In the child: the terminal is its own, so that Ctrl+C reaches it, even if whoever runs the tests ignores it."""
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


def test_ls_has_colours_and_fits_the_width(shop, terminal):
    shop.start("review", f'["{"long " * 40}"]', "--id", "a-run-with-a-rather-long-id", "--tag", "x=y")
    shop.run("cancel", "a-run-with-a-rather-long-id")
    shown = terminal("ls")
    assert shown.end() == 0
    assert COLOUR.search(shown.seen)
    assert "a-run-with-a-rather-long-id" in shown.text
    assert max(map(len, shown.text.splitlines())) <= COLUMNS


def test_show_draws_in_colours_and_folds_the_traceback(shop, terminal):
    with shop.worker():
        shop.start("checkout", '{"id": "1", "cents": -1}', "--id", "bad")
        shop.until("bad", "failed")
    shown = terminal("show", "bad")
    assert shown.end() == 0
    assert "\x1b[1;31mfailed" in shown.seen, "bold and red"
    assert "\x1b[31m━" in shown.seen, "and so is its bar"
    assert "folded: --trace unfolds it" in shown.text
    assert max(map(len, shown.text.splitlines())) <= COLUMNS


def test_errors_have_colours_and_the_next_command(terminal):
    refused = terminal("show", "nobody")
    assert refused.end() == 3
    assert "\x1b[1;31merror" in refused.seen
    assert "try: perdure ls --prefix nobody" in refused.text


def test_what_touches_several_runs_asks(shop, terminal):
    for name in ("a", "b"):
        shop.start("naps", None, "--id", name)
    refusing = terminal("cancel", "a", "b")
    refusing.until("cancel these 2 runs?")
    refusing.type("n\n")
    assert refusing.end() == 2
    assert {run["status"] for run in shop.json("ls")["runs"]} == {"pending"}
    agreeing = terminal("cancel", "--workflow", "naps")
    agreeing.until("cancel these 2 runs?")
    agreeing.type("y\n")
    assert agreeing.end() == 0
    assert "2 runs were asked to stop" in agreeing.text
    assert {run["status"] for run in shop.json("ls")["runs"]} == {"cancelled"}


def test_long_work_shows_a_bar_and_leaves_no_trace_of_it(shop, terminal):
    for name in ("a", "b"):
        shop.start("naps", None, "--id", name)
    checking = terminal("check", "shop")
    assert checking.end() == 0
    assert "replay" in checking.text
    assert "━" in checking.text
    assert checking.text.rstrip().endswith("2 open runs fit this code")


def test_watch_moves_until_the_run_has_ended(shop, terminal):
    with shop.worker():
        shop.start("checkout", '{"id": "1", "cents": 5}', "--id", "order")
        shop.until("order", "suspended")
        watching = terminal("watch", "order")
        watching.until("waits for")
        watching.until("event Approved")
        shop.run("send", "order", "Approved", '{"by": "ada"}')
        watching.until("receipt-1 approved by ada")
        assert watching.end() == 0
    assert "\x1b[?25l" in watching.seen, "the cursor is hidden while it moves"
    assert "\x1b[?25h" in watching.seen, "and comes back"


def test_watch_ends_with_ctrl_c_and_the_run_goes_on(shop, terminal):
    shop.start("naps", None, "--id", "nap")
    watching = terminal("watch", "nap")
    watching.until("waits for")
    watching.type("\x03")
    assert watching.end() == 130
    assert shop.json("show", "nap")["run"]["status"] == "pending"
