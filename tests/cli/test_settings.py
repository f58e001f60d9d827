"""Store and application of a command: options, environment, pyproject.toml, targets."""

import pytest

from perdure.cli.session import CommandError
from perdure.cli.settings import find_settings, store_url
from perdure.cli.target import parse_target


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a pyproject.toml; the current folder is two levels below it."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.perdure]\nstore = "sqlite:///data/shop.db?synchronous=off"\napp = "shop:one"\n'
    )
    below = tmp_path / "src" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    return tmp_path


def test_nearest_pyproject_wins_and_anchors_relative_files(project):
    assert store_url(None) == f"sqlite:///{project / 'data/shop.db'}?synchronous=off"
    assert store_url("memory://") == "memory://"
    target = parse_target(None)
    assert (target.module, target.attribute, target.folder) == ("shop", "one", project)


def test_pyproject_without_settings_is_skipped(project):
    (project / "src" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert find_settings().app == "shop:one"


@pytest.mark.parametrize("text", ["[tool.perdure]\nstroe = 'x'", "[tool.perdure]\nstore = 3", "[tool.perdure"])
def test_invalid_settings_are_refused(project, text):
    (project / "pyproject.toml").write_text(text)
    with pytest.raises(CommandError) as refused:
        store_url(None)
    assert "pyproject.toml" in str(refused.value)


def test_default_store_is_a_file_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store_url(None) == "sqlite:///perdure.db"


def test_reading_commands_do_not_create_the_default_store(shop):
    shop.url = ""
    refused = shop.run("ls", code=3).stderr
    for way in ("perdure.db", "--store", "PERDURE_STORE", "perdure migrate"):
        assert way in refused
    assert not (shop.folder / "perdure.db").exists()


def test_start_and_worker_share_the_default_store(shop):
    shop.url = ""
    with shop.worker():
        shop.run("start", "shop:naps", "--id", "nap")
        assert [run["id"] for run in shop.json("ls")["runs"]] == ["nap"]
    assert (shop.folder / "perdure.db").exists()


def test_option_wins_over_environment_and_environment_over_pyproject(shop):
    (shop.folder / "pyproject.toml").write_text('[tool.perdure]\nstore = "sqlite:///third.db"\napp = "shop"\n')
    shop.run("migrate", PERDURE_STORE="sqlite:///second.db")
    shop.run("migrate", "--store", "sqlite:///first.db", PERDURE_STORE="sqlite:///second.db")
    shop.run("migrate", PERDURE_STORE="")
    assert sorted(path.name for path in shop.folder.glob("*.db")) == ["first.db", "second.db", "shop.db", "third.db"]
    assert shop.run("start", "naps", "--id", "n", PERDURE_STORE="").stdout == "n\n"


@pytest.mark.parametrize(
    ("target", "code", "word"),
    [
        ("shop:one", 0, "1 open run is compatible"),
        ("shop.py", 0, "1 open run is compatible"),
        ("./shop.py:workflows", 0, "1 open run is compatible"),
        ("shop:nothing", 2, "42"),
        ("shop:lost", 2, "lost"),
        ("nowhere", 2, "no module nowhere"),
        ("nowhere.py", 2, "no file"),
    ],
)
def test_check_accepts_modules_files_and_attributes(shop, target, code, word):
    shop.start("checkout", '{"id": "1", "cents": 1}')
    done = shop.run("check", target, code=code)
    assert word in done.stdout + done.stderr
