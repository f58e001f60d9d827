"""Types reach the user: mypy knows what `await charge(order)` is, and refuses wrong arguments.

`valid.py` must pass, and in `invalid.py` every line with a `type: ignore[code]` must be refused with that code: strict
checking reports an ignore that is not needed.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


def check(*files: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), *map(str, files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_valid_code_passes_and_invalid_code_is_rejected(tmp_path: Path) -> None:
    done = check(HERE / "valid.py", HERE / "invalid.py", cache=ROOT / ".mypy_cache" / "tests-typing")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_invalid_line_is_an_error_without_its_comment(tmp_path: Path) -> None:
    """Guards the guard: that mypy was asked to look, and looks strictly."""
    source = (HERE / "invalid.py").read_text()
    wrong = {number for number, line in enumerate(source.splitlines(), 1) if "# type: ignore" in line}
    assert len(wrong) > 20
    file = tmp_path / "wrong_bare.py"
    file.write_text(re.sub(r"  # type: ignore\[[\w-]+\]", "", source))
    done = check(file, cache=ROOT / ".mypy_cache" / "tests-typing")
    found = {int(line) for line in re.findall(r"wrong_bare\.py:(\d+): error", done.stdout)}
    assert found == wrong, done.stdout
