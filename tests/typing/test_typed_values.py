"""The static type of a value follows the `type=` that a caller passes."""

from tests.typing.test_typing import HERE, ROOT, check


def test_types_of_values_follow_the_type_that_the_caller_passes() -> None:
    done = check(HERE / "valid_values.py", cache=ROOT / ".mypy_cache" / "tests-typing")
    assert done.returncode == 0, done.stdout + done.stderr
