"""check: runs that would be held by changed code are found before it is deployed, with the call that would help."""

import pytest

from perdure.admin.compatibility import suggest_fix
from perdure.cli.json_output import MISFIT
from perdure.model.records import Entry, EntryStatus, Hold
from tests.cli.cli_runner import SHOP, Shop, shape_of

CHARGE = "    receipt = await charge(order)\n"
JOIN = "    await ctx.join(left=ship(order), right=ship(order))\n"


@pytest.fixture(scope="module")
def open_runs(tmp_path_factory):
    """Two orders that wait for their approval, and a nap; nobody works."""
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
    (shop.folder / "changed.py").write_text(code)
    return "changed.py"


def test_code_that_has_not_changed_fits(open_runs):
    before = open_runs.json("ls")
    assert open_runs.json("check", "shop:workflows") == {"fits": True, "fitting": 3, "misfits": [], "foreign": {}}
    assert "3 open runs fit this code" in open_runs.run("check", "shop").stdout
    assert open_runs.json("ls") == before, "nothing was written"


def test_the_gate_on_a_server_too(shop_anywhere):
    shop = shop_anywhere
    with shop.worker():
        shop.start("checkout", '{"id": "1", "cents": 1}', "--id", "a")
        shop.until("a", "suspended")
    assert shop.json("check", "shop")["fits"]
    [misfit] = shop.json("check", changed(shop, (CHARGE, "    receipt = 'free'\n")), code=1)["misfits"]
    assert list(misfit) == list(MISFIT)
    assert 'ctx.removed("charge")' in misfit["remedy"]


def test_code_that_asks_for_something_new_is_found_and_a_guard_mends_it(open_runs):
    new = "    await ship.options(name='gift')(order)\n"
    target = changed(open_runs, (CHARGE, new + CHARGE))
    found = open_runs.json("check", target, "--prefix", "a", code=1)
    [misfit] = found["misfits"]
    reason = misfit.pop("reason")
    assert "diverged" in reason
    assert misfit.pop("line").endswith("in checkout")
    assert misfit == {
        "run": "a",
        "workflow": "checkout",
        "version": 1,
        "kind": "diverged",
        "location": "gift",
        "recorded": "step 'charge'",
        "asked": "step 'gift'",
        "remedy": """new runs only: if ctx.version("gift", latest=2) >= 2: ... around the new step 'gift'""",
    }
    guarded = f"    if ctx.version('gift', latest=2) >= 2:\n    {new}"
    assert open_runs.json("check", changed(open_runs, (CHARGE, guarded + CHARGE)))["fits"]


def test_code_that_no_longer_asks_is_found_and_removed_mends_it(open_runs):
    target = changed(open_runs, (CHARGE, "    receipt = 'free'\n"), (JOIN, JOIN + "    await charge(order)\n"))
    text = open_runs.run("check", target, "--workflow", "checkout", code=1).stdout
    assert "held b, a" in text, "one change is told once"
    assert 'ctx.removed("charge")' in text
    assert "2 would be held" in text
    removed = (CHARGE, "    receipt = 'free'\n    ctx.removed('charge')\n")
    assert open_runs.json("check", changed(open_runs, removed))["fits"]


def test_other_arguments_are_found(open_runs):
    target = changed(open_runs, ("await charge(order)", "await charge(Order(order.id, 2))"))
    [first, _] = open_runs.json("check", target, code=1)["misfits"]
    assert (first["recorded"], first["location"]) == ("other arguments", "charge")
    assert 'ctx.version("charge-arguments", latest=2)' in first["remedy"]


def test_a_payload_that_no_longer_fits_is_found(open_runs):
    target = changed(open_runs, ("    cents: int\n", "    cents: int\n    currency: str\n"))
    misfits = open_runs.json("check", target, code=1)["misfits"]
    assert [misfit["recorded"] for misfit in misfits] == ["the payload", "the payload"]
    assert "currency" in misfits[0]["reason"]


def test_a_version_that_the_code_has_no_more_is_found_and_foreign_workflows_are_passed_over(open_runs):
    target = changed(open_runs, ("@workflow\nasync def checkout", "@workflow(version=2)\nasync def checkout"))
    found = shape_of(open_runs.json("check", f"{target}:one", code=1))
    assert [(misfit["run"], misfit["kind"]) for misfit in found["misfits"]] == [
        ("b", "no_version"),
        ("a", "no_version"),
    ]
    assert found["foreign"] == {"naps": 1}


def test_code_that_cannot_be_imported_is_told_with_its_line(open_runs):
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
def test_the_remedy_fits_what_happened(held, words):
    entries = [Entry("p/~3/f#1", "step", "f", EntryStatus.SUCCEEDED, 1)]
    assert words in suggest_fix(held, entries)
