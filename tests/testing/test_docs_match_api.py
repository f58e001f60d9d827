"""What docs/testing.md shows to pytest passes under pytest; its programs are run by tests/docs."""

import re
from pathlib import Path

import pytest

from perdure import testing
from tests.testing.test_pytest_plugin import pytest_in

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_docs_contain_test_blocks():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS)
def test_test_in_the_docs_passes(block, tmp_path):
    done = pytest_in(tmp_path, block)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* passed", done.stdout)


@pytest.mark.parametrize("name", sorted({"TestEngine", "crash_everywhere", "replay", "StoreContract"}))
def test_public_names_are_documented(name):
    assert name in testing.__all__
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", [name for name in dir(testing.TestEngine) if name in vars(testing.TestEngine)])
def test_every_added_call_is_documented(name):
    if not name.startswith("_") and name not in ("open", "shutdown", "drop"):
        assert re.search(rf"\b{name}\(", PAGE), name
