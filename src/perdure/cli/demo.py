"""Command demo: run the bundled program in which a worker is killed during an order and another one finishes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

from perdure.cli.session import CommandError, error_reporting

HERE = Path(__file__).resolve().parent
# An installed package has the program beside this file, a checkout in its examples.
CANDIDATES = (HERE / "crash_demo.py", HERE.parents[2] / "examples" / "crash_demo.py")


def demo() -> None:
    """Show how an order survives: its worker is killed, and another worker finishes it."""
    with error_reporting():
        program = next((path for path in CANDIDATES if path.is_file()), None)
        if program is None:
            raise CommandError("the demo is not part of this installation", "reinstall perdure")
        code = subprocess.run([sys.executable, str(program)], check=False).returncode
    raise typer.Exit(code)
