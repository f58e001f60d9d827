"""Command lint: it finds what differs on replay, and nothing else, also in the code of this repository."""

import json
import subprocess
import sys
from collections import defaultdict

import pytest

from perdure.cli.json_output import LINT_FINDING
from tests.cli.cli_runner import ROOT

HEADER = """
import asyncio, datetime as dt, os, random, secrets, subprocess, time, urllib.request, uuid
from datetime import datetime
from os import environ
from pathlib import Path
from time import time as clock
from perdure import Context, step, workflow

CACHE: dict[str, int] = {}
NAMES = {"a", "b"}
LIMITS = {"small": 1}
COUNT = 0

@step
def read(path: str) -> str:
    return Path(path).read_text() + str(time.time())

def helper() -> float:
    return clock()

@workflow
async def subject(ctx: Context, items: list[str]) -> object:
"""

PROBLEMS = {
    "return datetime.now()": ("datetime.now()", "ctx.now()"),
    "return dt.date.today()": ("dt.date.today()", "ctx.now()"),
    "return time.time()": ("time.time()", "ctx.now()"),
    "return clock()": ("clock()", "ctx.now()"),
    "time.sleep(1)": ("time.sleep()", "ctx.sleep()"),
    "return random.choice(items)": ("random.choice()", "ctx.random"),
    "return random.Random().random()": ("random.Random()", "ctx.random"),
    "return secrets.token_hex()": ("secrets.token_hex()", "step"),
    "return uuid.uuid4()": ("uuid.uuid4()", "ctx.uuid()"),
    "return os.environ['HOME']": ("os.environ", "step"),
    "return environ.get('HOME')": ("os.environ", "step"),
    "return os.getenv('HOME')": ("os.getenv()", "step"),
    "return open('x')": ("open()", "step"),
    "return Path('x').read_text()": ("Path('x').read_text()", "step"),
    "return subprocess.run(['ls'])": ("subprocess.run()", "step"),
    "return urllib.request.urlopen('http://x')": ("urllib.request.urlopen()", "step"),
    "return [name for name in {'a', 'b'}]": ("iteration over a set", "sorted"),
    "return list(set(items))": ("iteration over a set", "sorted"),
    "found = set(items)\n    for each in found: await ctx.sleep(1)": ("iteration over a set", "sorted"),
    "for name in NAMES: await ctx.sleep(1)": ("iteration over a set", "sorted"),
    "CACHE['x'] = 1": ("change of the module-level dict CACHE", "local variables"),
    "CACHE.update(x=1)": ("change of the module-level dict CACHE", "local variables"),
    "global COUNT\n    COUNT += 1": ("global COUNT", "local variables"),
    "return helper()": ("clock()", "ctx.now()"),
    "async def inner(): return time.time()\n    return await inner()": ("time.time()", "ctx.now()"),
}

ACCEPTED = [
    "return ctx.now(), ctx.random.random(), ctx.uuid()",
    "return await read('x')",
    "return sorted({'a', 'b'}), len(set(items)), 'a' in NAMES",
    "return sum(len(each) for each in {'a', 'b'}), {each.upper() for each in NAMES}",
    "return LIMITS['small']",
    "cache: dict[str, int] = {}\n    cache['x'] = 1\n    return cache",
    "time = ctx\n    return time.now()",
    "return random.Random(7).random()",
    "await asyncio.sleep(1)\n    return dt.datetime(2025, 1, 1)",
    "return Path('x') / 'y'",
    "return time.time()  # perdure: ignore",
]


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """The findings of all bodies, each in a module of its own, by body."""
    folder, bodies = tmp_path_factory.mktemp("linted"), [*PROBLEMS, *ACCEPTED]
    paths = [folder / f"linted_{number}.py" for number in range(len(bodies))]
    for path, body in zip(paths, bodies, strict=True):
        path.write_text(f"{HEADER}    {body}\n")
    found = lint(paths)
    return {body: found.get(str(path), []) for path, body in zip(paths, bodies, strict=True)}


@pytest.mark.parametrize("body", PROBLEMS)
def test_problem_is_found_with_its_line_and_remedy(body, findings):
    [found] = findings[body]
    text, remedy = PROBLEMS[body]
    assert list(found) == list(LINT_FINDING)
    assert (found["text"], found["workflow"]) == (text, "subject")
    assert remedy in found["remedy"]
    line = f"{HEADER}    {body}".splitlines()[found["line"] - 1].strip()
    assert line in body or line == "return clock()"


@pytest.mark.parametrize("body", ACCEPTED)
def test_deterministic_code_is_accepted(body, findings):
    assert findings[body] == []


def test_findings_are_printed_as_lines(shop):
    (shop.folder / "shop.py").write_text(
        "import time\nfrom perdure import Context, workflow\n\n"
        "@workflow\nasync def late(ctx: Context) -> float:\n    return time.time()\n"
    )
    shown = shop.run("lint", "shop.py", code=1).stdout.splitlines()
    assert shown[0].endswith("shop.py:6: time.time() in workflow late: use ctx.now()")
    assert shown[1] == "1 problem"


def test_check_with_lint_reports_both(shop):
    shop.run("migrate")
    assert shop.json("check", "shop", "--lint")["findings"] == []
    (shop.folder / "other.py").write_text(
        "import time\nfrom perdure import Context, workflow\n\n"
        "@workflow\nasync def late(ctx: Context) -> float:\n    return time.time()\n"
    )
    found = shop.json("check", "other", "--lint", code=1)
    assert found["compatible"]
    assert [each["line"] for each in found["findings"]] == [6]


LINT_FILES = """
import importlib.util, json, sys
from perdure.admin.lint import lint
from perdure.cli.json_output import lint_shape
from perdure.workflows.definition import Workflow

found = []
for number, path in enumerate(sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(f"linted_{number}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found += lint([value for value in vars(module).values() if isinstance(value, Workflow)])
print(json.dumps([lint_shape(each) for each in found]))
"""


def lint(paths):
    """Import files in another process, and return the findings of their workflows by path."""
    done = subprocess.run(
        [sys.executable, "-c", LINT_FILES, *map(str, paths)],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = defaultdict(list)
    for finding in json.loads(done.stdout.splitlines()[-1]):
        found[finding["path"]].append(finding)
    return dict(found)


def test_only_intended_problems_are_found_in_examples_and_tests():
    """Workflows of tests that break the rules on purpose say so with a comment."""
    paths = [path for folder in ("examples", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    paths = [
        path for path in paths if path.name not in ("conftest.py", "invalid.py") and "@workflow" in path.read_text()
    ]
    assert lint(paths) == {}
