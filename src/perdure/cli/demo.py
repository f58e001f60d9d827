"""demo: the bundled program in which a worker is killed in the middle of an order, and the order goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

from perdure.cli.session import CommandError, error_reporting

HERE = Path(__file__).resolve().parent
# In an installed package it lies beside this file, in a checkout where it is read as an example.
PLACES = (HERE / "crash_demo.py", HERE.parents[2] / "examples" / "crash_demo.py")


def demo() -> None:
    """Watch a worker being killed in the middle of an order, and the order being finished by another."""
    with error_reporting():
        program = next((place for place in PLACES if place.is_file()), None)
        if program is None:
            raise CommandError("the demo is not part of this installation", "install perdure again")
        code = subprocess.run([sys.executable, str(program)], check=False).returncode
    raise typer.Exit(code)
