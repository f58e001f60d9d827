"""Commands load the current code, even if an edit within the same second kept the size of a file."""

import os

from perdure.cli.dev import worker_command
from perdure.cli.target import parse_target
from tests.cli.cli_runner import SHOP

COMPATIBLE = SHOP
INCOMPATIBLE = SHOP.replace("await charge(order)", "await ship( order )")


def write(path, code):
    path.write_text(code)
    os.utime(path, (1_750_000_000, 1_750_000_000))


def test_check_finds_a_change_that_keeps_size_and_second(shop):
    assert len(COMPATIBLE) == len(INCOMPATIBLE)
    with shop.worker():
        shop.start("checkout", '{"id": "1", "cents": 1}', "--id", "a")
        shop.until("a", "suspended")
    write(shop.folder / "edited.py", COMPATIBLE)
    shop.run("check", "edited.py", PYTHONDONTWRITEBYTECODE="")
    write(shop.folder / "edited.py", INCOMPATIBLE)
    assert "1 incompatible run" in shop.run("check", "edited.py", code=1, PYTHONDONTWRITEBYTECODE="").stdout


def test_dev_starts_a_worker_that_writes_no_bytecode(shop, monkeypatch):
    monkeypatch.chdir(shop.folder)
    command = worker_command(parse_target("shop.py"), None, None)
    assert command[1] == "-B"
