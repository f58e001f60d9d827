"""House rules that a formatter cannot know: banned imports, sizes, names, what a public file may not contain."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.sources import ROOT, dotted_names, package_modules, python_files, resolve, written_files

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 80

# Payloads are data only, and SQL is written by hand; these have no place in the package, not even inside a function.
BANNED_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "sqlalchemy", "aiosqlite"}
# Supported when it is installed, so it is imported only where one of its models is met.
LAZY_IMPORTS = {"pydantic"}

VAGUE_NAMES = re.compile(r"(utils?|common|helpers?|managers?|misc|base_.+|.+_(utils?|helpers?|manager))")

# Words that the style guide replaces by the usual terms of the field, in text and in names (docs/adr/README.md).
BANNED_WORDS = re.compile(
    r"(?<![A-Za-z])(rooms?|errands?|handfuls?|newborns?|nobody|somebody|whoever|he|his|him|himself|mend(s|ed|ing)?|deeds?|"
    r"plainly|told|owes|owing|seclusion|neighbours?|call-backs?|time-outs?)(?![A-Za-z])",
    re.IGNORECASE,
)
# File -> words that may stay there. Empty: a file that needs an exception says why here.
ALLOWED_WORDS: dict[str, frozenset[str]] = {}

# Each has a [letter] in it, so that this file, which is searched too, does not match itself.
REGISTRIES = re.compile(r"pypi[.](org|python|io)|python[h]osted|npm[j]s[.]|anaconda[.]org")
HOME_PATHS = re.compile(r"(?<![\w.~/-])(/[h]ome/[\w.-]+|/[U]sers/[\w.-]+|/[r]oot/)")


def test_modules_say_what_they_are_for():
    silent = [str(module.path) for module in package_modules().values() if not (ast.get_docstring(module.tree) or "")]
    assert not silent, "\n".join(silent)


def test_modules_stay_small():
    lengths = {str(module.path): module.source.count("\n") for module in package_modules().values()}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_MODULE_LINES} == {}


def test_functions_stay_small():
    lengths = {
        f"{module.path}:{function.lineno} {function.name}": length
        for module in package_modules().values()
        for function, length in function_lengths(module.tree)
    }
    assert {where: lines for where, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_no_banned_imports():
    faults = [
        f"{module.path}:{line} imports {name}"
        for module in package_modules().values()
        for name, line in banned_imports(module.tree)
    ]
    assert not faults, "\n".join(faults)


def test_no_vague_file_names():
    folders = [ROOT / name for name in ("src", "tests", "examples", "benchmarks")]
    files = [path.relative_to(ROOT) for path in python_files(*folders)]
    vague = {str(file) for file in files for part in file.with_suffix("").parts if VAGUE_NAMES.fullmatch(part)}
    assert vague == set()


def test_no_registry_hosts_and_no_home_paths():
    faults = []
    for path in written_files():
        for number, line in enumerate(_text(path).splitlines(), start=1):
            if REGISTRIES.search(line) or HOME_PATHS.search(line):
                faults.append(f"{path.relative_to(ROOT)}:{number} {line.strip()}")
    assert not faults, "\n".join(faults)


def test_no_banned_words():
    """In code, names, comments and docs alike. Names count by their parts: `told_to_stop` contains a banned word."""
    faults = [
        f"{path.relative_to(ROOT)}:{number} {word}"
        for path in written_files()
        if path.suffix in (".py", ".md", ".sql", ".lua", ".toml") and path != Path(__file__)
        for number, word in banned_words(_text(path))
        if word.lower() not in ALLOWED_WORDS.get(str(path.relative_to(ROOT)), ())
    ]
    assert not faults, f"{len(faults)} banned words:\n" + "\n".join(faults)


def test_every_skipped_test_says_why():
    faults = [
        f"{path.relative_to(ROOT)}:{line} {what} without a reason"
        for path in python_files(ROOT / "tests")
        for what, line in silent_skips(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not faults, "\n".join(faults)


def function_lengths(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Each function with the number of its lines from `def` to the end."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, (node.end_lineno or node.lineno) - node.lineno + 1


def banned_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top in BANNED_IMPORTS or (top in LAZY_IMPORTS and id(node) not in inside_functions):
                yield top, node.lineno


def banned_words(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the word for each banned word; parts of snake_case and camelCase names count."""
    for number, line in enumerate(text.splitlines(), start=1):
        parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line.replace("_", " "))
        yield from ((number, found[0]) for found in BANNED_WORDS.finditer(parts))


def silent_skips(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Skips and expected failures whose reason is missing or empty."""
    names = dotted_names(tree)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    reason_position = {
        "pytest.skip": 0,
        "pytest.mark.skip": 0,
        "pytest.xfail": 0,
        "unittest.skip": 0,
        "pytest.mark.skipif": None,
        "pytest.mark.xfail": None,
        "pytest.importorskip": None,
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            what = resolve(node, names)
            if what in reason_position and not _has_reason(called.get(id(node)), reason_position[what]):
                yield what, node.lineno


def _has_reason(call: ast.Call | None, position: int | None) -> bool:
    if call is None:
        return False
    given = [keyword.value for keyword in call.keywords if keyword.arg in ("reason", "msg")]
    if position is not None:
        given += call.args[position : position + 1]
    return any(not isinstance(value, ast.Constant) or bool(value.value) for value in given)


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", errors="replace")


# The checks themselves.


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("def f():\n    import pickle", ["pickle"]),
        ("from sqlalchemy.orm import Session", ["sqlalchemy"]),
        ("import pydantic", ["pydantic"]),
        ("if True:\n    from pydantic import BaseModel", ["pydantic"]),
        ("def f():\n    from pydantic import BaseModel", []),
        ("import msgspec", []),
    ],
)
def test_what_counts_as_a_banned_import(source, found):
    assert [name for name, _ in banned_imports(ast.parse(source))] == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("@pytest.mark.skip\ndef test(): ...", ["pytest.mark.skip"]),
        ("@pytest.mark.skip()\ndef test(): ...", ["pytest.mark.skip"]),
        ("@pytest.mark.skip(reason='')\ndef test(): ...", ["pytest.mark.skip"]),
        ("@pytest.mark.skip('needs a disk')\ndef test(): ...", []),
        ("@pytest.mark.skipif(True)\ndef test(): ...", ["pytest.mark.skipif"]),
        ("@pytest.mark.skipif(True, reason='needs a disk')\ndef test(): ...", []),
        ("@pytest.mark.xfail\ndef test(): ...", ["pytest.mark.xfail"]),
        ("pytest.skip()", ["pytest.skip"]),
        ("pytest.skip(f'needs {x}')", []),
        ("pytest.importorskip('redis')", ["pytest.importorskip"]),
        ("marks = [pytest.mark.skip]", ["pytest.mark.skip"]),
    ],
)
def test_what_counts_as_a_silent_skip(source, found):
    assert [what for what, _ in silent_skips(ast.parse("import pytest\n" + source))] == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see https://" + "pypi" + ".org/project/x", True),
        ("https://files." + "python" + "hosted.org", True),
        ("cd /ho" + "me/ada/perdure", True),
        ("'/ro" + "ot/x'", True),
        ("sqlite:////var/lib/shop.db", False),
        ("https://example.org/ho" + "me/page", False),
    ],
)
def test_what_counts_as_a_host_or_a_home(text, found):
    assert bool(REGISTRIES.search(text) or HOME_PATHS.search(text)) is found


@pytest.mark.parametrize(
    ("name", "vague"),
    [("utils", True), ("store_helpers", True), ("base_store", True), ("base", False), ("committer", False)],
)
def test_what_counts_as_a_vague_name(name, vague):
    assert bool(VAGUE_NAMES.fullmatch(name)) is vague


def test_a_function_is_measured_from_its_first_to_its_last_line():
    tree = ast.parse("@decorator\nasync def f():\n    a\n    b\n")
    assert [length for _, length in function_lengths(tree)] == [3]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# nobody waits", ["nobody"]),
        ("def told_to_stop():", ["told"]),
        ("class NewRoom:", ["Room"]),
        ("a call-back and a time-out", ["call-back", "time-out"]),
        ("the cache, this history, a chat room", ["room"]),
        ("bedroom, threshold, recommended, amend", []),
    ],
)
def test_what_counts_as_a_banned_word(text, found):
    assert [word for _, word in banned_words(text)] == found
