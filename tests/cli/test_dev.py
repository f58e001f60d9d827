"""Commands worker, dev and demo."""

import json
import os
import signal
import threading

from perdure.cli.dev import stamps
from tests.cli.cli_runner import SHOP, TIMEOUT_SECONDS


def lines_until(process, found):
    """Return the lines of a process up to the first match; kill the process after a timeout."""
    timer = threading.Timer(TIMEOUT_SECONDS, process.kill)
    timer.start()
    seen = []
    try:
        for line in process.stdout:
            seen.append(line)
            if found(line):
                return seen
        raise AssertionError(seen)
    finally:
        timer.cancel()


def test_worker_reports_its_workflows_and_releases_its_runs(shop):
    worker = shop.popen("worker", "shop:one", "--json", "--pool", "other", "--concurrency", "3", "--grace", "1")
    [line] = lines_until(worker, lambda line: True)
    started = json.loads(line)
    assert {**started, "pid": 0} == {
        "worker": "started",
        "pid": 0,
        "pool": "other",
        "store": shop.url,
        "workflows": [{"name": "checkout", "version": 1}],
    }
    worker.send_signal(signal.SIGTERM)
    [line] = lines_until(worker, lambda line: True)
    assert json.loads(line)["worker"] == "stopped"
    assert worker.wait(TIMEOUT_SECONDS) == 0
    worker.stdout.close()
    assert shop.json("workers") == {"workers": []}


def test_dev_reports_entries_and_reloads_changed_code(shop):
    dev = shop.popen("dev", "shop.py", "--json")
    try:
        shop.start("checkout", '{"id": "1", "cents": 5}', "--id", "order")
        lines_until(dev, lambda line: '"location":"charge"' in line and '"succeeded"' in line)
        lines_until(dev, lambda line: '"location":"Approved"' in line)

        (shop.folder / "shop.py").write_text(SHOP + "\n(")
        lines_until(dev, lambda line: '"worker":"reloading"' in line and "shop.py" in line)
        lines_until(dev, lambda line: '"worker":"exited"' in line)

        (shop.folder / "shop.py").write_text(SHOP.replace("approved by", "waved through by"))
        lines_until(dev, lambda line: '"worker":"reloading"' in line)
        shop.run("send", "order", "Approved", '{"by": "ada"}')
        [last] = lines_until(dev, lambda line: '"succeeded"' in line and '"workflow"' in line)[-1:]
        assert json.loads(last)["run"]["result"] == "receipt-1 waved through by ada"
    finally:
        code = shop.stop(dev)
    assert code == 0
    assert shop.json("workers") == {"workers": []}, "its worker is removed"


BLOCKS = """
import time

@workflow
async def dozes(ctx: Context) -> None:
    time.sleep(0.001)
"""


def test_dev_refuses_blocking_calls_and_reports_short_runs(shop):
    (shop.folder / "shop.py").write_text(SHOP + BLOCKS)
    dev = shop.popen("dev", "shop.py")
    try:
        lines_until(dev, lambda line: "dozes" in line)
        shop.start("dozes", None, "--id", "doze")
        [line] = lines_until(dev, lambda line: "doze  failed" in line)[-1:]
        assert "time.sleep() cannot be called in a workflow: move it into a step (at " in line
        assert "in dozes)" in line
    finally:
        assert shop.stop(dev) == 0


def test_worker_allows_blocking_calls_by_default(shop):
    (shop.folder / "shop.py").write_text(SHOP + BLOCKS)
    with shop.worker("shop"):
        shop.start("dozes", None, "--id", "doze")
        shop.until("doze", "succeeded")


def test_dev_creates_the_default_store(shop):
    shop.url = ""
    dev = shop.popen("dev", "shop.py")
    try:
        [line] = lines_until(dev, lambda line: True)
        assert "sqlite:///perdure.db" in line
    finally:
        shop.stop(dev)


def test_dev_watches_only_python_files_of_the_project(tmp_path):
    for name in ("a.py", "b.txt", "deep/c.py", ".venv/d.py", "venv/e.py", "__pycache__/f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    seen = stamps([tmp_path])
    assert sorted(os.path.relpath(name, tmp_path) for name in seen) == ["a.py", os.path.join("deep", "c.py")]  # noqa: PTH118


def test_the_demo_runs(shop):
    assert "No step ran twice" in shop.run("demo").stdout
