"""Command check: incompatible runs are found before a deploy, with a suggested fix."""

import zlib

import pytest

from perdure.admin.compatibility import suggest_fix
from perdure.cli.json_output import INCOMPATIBLE_RUN
from perdure.model.records import Entry, EntryStatus, Hold
from tests.cli.cli_runner import SHOP, Shop, shape_of

CHARGE = "    receipt = await charge(order)\n"
JOIN = "    await ctx.join(left=ship(order), right=ship(order))\n"


@pytest.fixture(scope="module")
def open_runs(tmp_path_factory):
    """Two orders that wait for approval, and a sleeping run; no worker."""
    shop = Shop(tmp_path_factory.mktemp("open"))
    with shop.worker():
        for name in ("a", "b"):
            shop.start("checkout", '{"id": "1", "cents": 1}', "--id", name)
            shop.until(name, "suspended")
        shop.start("naps", None, "--id", "nap")
        shop.until("nap", "suspended")
    return shop


def changed(shop, *replacements):
    code = SHOP + "\nimport pathlib\n"
    for old, new in replacements:
        assert old in code
        code = code.replace(old, new)
    # A name for each content: Python matches bytecode by name, size and whole seconds.
    name = f"changed_{zlib.crc32(code.encode()):08x}.py"
    (shop.folder / name).write_text(code)
    return name


def test_unchanged_code_is_compatible(open_runs):
    before = open_runs.json("ls")
    assert open_runs.json("check", "shop:workflows") == {
        "compatible": True,
        "compatible_runs": 3,
        "incompatible_runs": [],
        "unknown_workflows": {},
    }
    assert "3 open runs are compatible with this code" in open_runs.run("check", "shop").stdout
    assert open_runs.json("ls") == before, "nothing was written"


def test_check_works_on_every_store(shop_anywhere):
    shop = shop_anywhere
    with shop.worker():
        shop.start("checkout", '{"id": "1", "cents": 1}', "--id", "a")
        shop.until("a", "suspended")
    assert shop.json("check", "shop")["compatible"]
    [incompatible] = shop.json("check", changed(shop, (CHARGE, "    receipt = 'free'\n")), code=1)["incompatible_runs"]
    assert list(incompatible) == list(INCOMPATIBLE_RUN)
    assert 'ctx.removed("charge")' in incompatible["suggested_fix"]


def test_new_step_is_found_and_a_version_gate_fixes_it(open_runs):
    new = "    await ship.options(name='gift')(order)\n"
    target = changed(open_runs, (CHARGE, new + CHARGE))
    found = open_runs.json("check", target, "--prefix", "a", code=1)
    [incompatible] = found["incompatible_runs"]
    reason = incompatible.pop("reason")
    assert "diverged" in reason
    assert incompatible.pop("line").endswith("in checkout")
    assert incompatible == {
        "run": "a",
        "workflow": "checkout",
        "version": 1,
        "kind": "diverged",
        "location": "gift",
        "recorded": "step 'charge'",
        "asked": "step 'gift'",
        "suggested_fix": """new runs only: if ctx.version("gift", latest=2) >= 2: ... around the new step 'gift'""",
    }
    guarded = f"    if ctx.version('gift', latest=2) >= 2:\n    {new}"
    assert open_runs.json("check", changed(open_runs, (CHARGE, guarded + CHARGE)))["compatible"]


def test_missing_step_is_found_and_ctx_removed_fixes_it(open_runs):
    target = changed(open_runs, (CHARGE, "    receipt = 'free'\n"), (JOIN, JOIN + "    await charge(order)\n"))
    text = open_runs.run("check", target, "--workflow", "checkout", code=1).stdout
    assert "held b, a" in text, "runs with one cause are listed together"
    assert 'ctx.removed("charge")' in text
    assert "2 incompatible runs" in text
    removed = (CHARGE, "    receipt = 'free'\n    ctx.removed('charge')\n")
    assert open_runs.json("check", changed(open_runs, removed))["compatible"]


def test_changed_arguments_are_found(open_runs):
    target = changed(open_runs, ("await charge(order)", "await charge(Order(order.id, 2))"))
    [first, _] = open_runs.json("check", target, code=1)["incompatible_runs"]
    assert (first["recorded"], first["location"]) == ("other arguments", "charge")
    assert 'ctx.version("charge-arguments", latest=2)' in first["suggested_fix"]


def test_changed_payload_type_is_found(open_runs):
    target = changed(open_runs, ("    cents: int\n", "    cents: int\n    currency: str\n"))
    found = open_runs.json("check", target, code=1)["incompatible_runs"]
    assert [each["recorded"] for each in found] == ["the payload", "the payload"]
    assert "currency" in found[0]["reason"]


def test_missing_version_is_found_and_unknown_workflows_are_skipped(open_runs):
    target = changed(open_runs, ("@workflow\nasync def checkout", "@workflow(version=2)\nasync def checkout"))
    found = shape_of(open_runs.json("check", f"{target}:one", code=1))
    assert [(each["run"], each["kind"]) for each in found["incompatible_runs"]] == [
        ("b", "no_version"),
        ("a", "no_version"),
    ]
    assert found["unknown_workflows"] == {"naps": 1}


def test_import_error_is_reported_with_its_line(open_runs):
    target = changed(open_runs, ("import pathlib", "import pathlib; 1 / 0"))
    done = open_runs.run("check", target, code=1)
    assert "ZeroDivisionError" in done.stderr
    assert "importlib" not in done.stderr


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (
            Hold("diverged", "", location="b", recorded="sleep 'sleep'", asked="nothing"),
            'ctx.removed("sleep", "sleep")',
        ),
        (Hold("diverged", "", location="x", recorded="step 'p/~3/f#1'", asked="step 'new[7]'"), 'ctx.version("new"'),
        (Hold("diverged", "", location="x", recorded="a timer that fired", asked="no such timer"), "ctx.version("),
        (Hold("diverged", "", location="f", recorded="step 'a'", asked="step 'f'"), 'ctx.version("f"'),
        (Hold("diverged", "", location="p", recorded="step 'a'", asked="step 'p/~3/f#1'"), 'ctx.removed("a")'),
        (Hold("livelock", "it spins"), "see the line"),
    ],
)
def test_suggested_fix_depends_on_the_hold(held, words):
    entries = [Entry("p/~3/f#1", "step", "f", EntryStatus.SUCCEEDED, 1)]
    assert words in suggest_fix(held, entries)
