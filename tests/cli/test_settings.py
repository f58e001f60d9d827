"""Which store and which code: options, the environment, pyproject.toml; and what may stand for a target."""

import pytest

from perdure.cli.session import CommandError
from perdure.cli.settings import find_settings, store_url
from perdure.cli.target import parse_target


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a pyproject.toml, in which one stands two levels below."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.perdure]\nstore = "sqlite:///data/shop.db?synchronous=off"\napp = "shop:one"\n'
    )
    below = tmp_path / "src" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    return tmp_path


def test_the_nearest_pyproject_counts_and_its_file_is_relative_to_it(project):
    assert store_url(None) == f"sqlite:///{project / 'data/shop.db'}?synchronous=off"
    assert store_url("memory://") == "memory://"
    target = parse_target(None)
    assert (target.module, target.attribute, target.folder) == ("shop", "one", project)


def test_a_pyproject_without_settings_is_passed_over(project):
    (project / "src" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find_settings().app == "shop:one"


@pytest.mark.parametrize("text", ["[tool.perdure]\nstroe = 'x'", "[tool.perdure]\nstore = 3", "[tool.perdure"])
def test_settings_that_make_no_sense_are_refused(project, text):
    (project / "pyproject.toml").write_text(text)
    with pytest.raises(CommandError) as refused:
        store_url(None)
    assert "pyproject.toml" in str(refused.value)


def test_without_any_store_the_three_ways_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError) as refused:
        store_url(None)
    for way in ("--store", "PERDURE_STORE", "[tool.perdure]"):
        assert way in refused.value.advice


def test_the_environment_goes_before_pyproject_and_an_option_before_both(shop):
    (shop.folder / "pyproject.toml").write_text('[tool.perdure]\nstore = "sqlite:///third.db"\napp = "shop"\n')
    shop.run("migrate", PERDURE_STORE="sqlite:///second.db")
    shop.run("migrate", "--store", "sqlite:///first.db", PERDURE_STORE="sqlite:///second.db")
    shop.run("migrate", PERDURE_STORE="")
    assert sorted(path.name for path in shop.folder.glob("*.db")) == ["first.db", "second.db", "shop.db", "third.db"]
    assert shop.run("start", "naps", "--id", "n", PERDURE_STORE="").stdout == "n\n"


@pytest.mark.parametrize(
    ("target", "code", "word"),
    [
        ("shop:one", 0, "1 open run fits"),
        ("shop.py", 0, "1 open run fits"),
        ("./shop.py:workflows", 0, "1 open run fits"),
        ("shop:nothing", 2, "42"),
        ("shop:lost", 2, "lost"),
        ("nowhere", 2, "no module nowhere"),
        ("nowhere.py", 2, "no file"),
    ],
)
def test_targets(shop, target, code, word):
    shop.start("checkout", '{"id": "1", "cents": 1}')
    done = shop.run("check", target, code=code)
    assert word in done.stdout + done.stderr
