"""Targets of the Makefile that need what a machine may not have."""

import shutil
import subprocess

import pytest

from tests.tidy.sources import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_test_pythons_fails_and_names_a_missing_interpreter():
    command = ["make", "test-pythons", "VERSIONS=3.99"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    assert "needs Python 3.99" in result.stderr


def test_test_pythons_is_no_part_of_test():
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("test-pythons:") for line in lines)
    assert not any("test-pythons" in line for line in lines if line.startswith(("test:", "check:", "test-long:")))
