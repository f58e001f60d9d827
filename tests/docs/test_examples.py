"""Test the examples as complete programs: they run as they are and continue after SIGKILL."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKSPACE = ROOT / "examples" / "shared_workspace.py"
REVIEW = ROOT / "examples" / "human_approval.py"
PATH = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "crash_demo"]


def program(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(*arguments: str | Path, stderr: str = "") -> str:
    """Return what a program prints. Its stderr must match the pattern `stderr` completely."""
    running = program(*arguments)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, out + err
    assert re.fullmatch(stderr, err), err
    return out


# --- pages


@pytest.mark.parametrize("example", [path.stem for path in EXAMPLES], ids=str)
def test_example_has_a_page_that_shows_it(example):
    page = (ROOT / "docs" / "examples" / f"{example}.md").read_text()
    assert f"```python\n{(ROOT / 'examples' / f'{example}.py').read_text()}```" in page


# --- shared_workspace.py


@pytest.fixture
def workspace(tmp_path):
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("text")
    return tmp_path


REPORTS = ["report-first.md", "report-second.md", "report-third.md"]


def reports(workspace: Path) -> list[str]:
    return sorted(path.name for path in workspace.glob("report-*.md"))


def test_runs_use_the_workspace_one_after_the_other(workspace):
    shown = output(WORKSPACE, workspace)
    assert shown.startswith("Started new runs:\n")
    runs = re.findall(r"^  review-(\w+), ", shown, re.MULTILINE)
    assert len(runs) == 12
    assert [run for run, _ in itertools.groupby(runs)] == list(dict.fromkeys(runs)), "two runs held the lock at once"
    assert reports(workspace) == REPORTS


def test_finished_reports_are_not_written_again(workspace):
    output(WORKSPACE, workspace)
    assert output(WORKSPACE, workspace) == "\n".join(["Continuing existing runs:", *REPORTS, ""])


def test_next_process_continues_the_runs_of_a_killed_process_and_releases_the_lock(workspace):
    first = program(WORKSPACE, workspace)
    assert first.stdout is not None
    for line in first.stdout:
        if "calling the agent" in line:  # now this run holds the lock and the others wait for it
            break
    first.kill()
    first.communicate()
    again = output(WORKSPACE, workspace, stderr=r"[Tt]ook over .*1 .*\n")
    assert again.startswith("Continuing existing runs:")
    assert reports(workspace) == REPORTS


# --- human_approval.py


def test_second_process_approves_a_text_while_no_worker_runs():
    before, _, rest = output(REVIEW).partition("It has exited. Second process, the reviewer:\n")
    agents = re.findall(r"^  (\S+)$", before, re.MULTILINE)
    assert agents[0] == "draft_agent"
    assert sorted(agents[1:3]) == ["critics/facts/critic_agent", "critics/style/critic_agent"]
    assert agents[3:] == ["refine_agent", "notify_reviewer"]
    approved, finished = rest.split("Third process, which finishes the run:\n")
    assert approved == "approved\n"
    assert re.findall(r"^  (\S+)$", finished, re.MULTILINE) == ["finalize_agent"], "no step runs twice"
    assert finished.splitlines()[-1] == (
        "draft of 'the home page', refined by 2 reviews, final after 'shorter, please'"
    )


@pytest.fixture
def waiting(tmp_path):
    """Store URL, reviewer's folder and token of a run that waits for its reviewer."""
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    output(REVIEW, "begin", url, tmp_path, "a poem")
    return url, tmp_path, json.loads((tmp_path / "review.json").read_text())["token"]


def test_rejected_text_is_not_finalized(waiting):
    url, reviewer, token = waiting
    assert output(REVIEW, "reject", url, token, "no rhymes") == "rejected\n"
    assert output(REVIEW, "finish", url, reviewer, "a poem") == "rejected: no rhymes\n"


def test_second_decision_is_ignored(waiting):
    url, reviewer, token = waiting
    output(REVIEW, "reject", url, token, "no rhymes")
    assert output(REVIEW, "approve", url, token, "fine") == "already decided\n"
    assert output(REVIEW, "finish", url, reviewer, "a poem") == "rejected: no rhymes\n"


def test_forged_token_is_rejected(waiting):
    url, _, token = waiting
    forged = program(REVIEW, "approve", url, token[:-2] + "AA", "fine")
    _, err = forged.communicate(timeout=60)
    assert forged.returncode == 1
    assert err.startswith("rejected token: ")
    assert output(REVIEW, "reject", url, token, "no") == "rejected\n"


def test_unknown_command_prints_the_usage():
    misspelled = program(REVIEW, "aprove")
    _, err = misspelled.communicate(timeout=60)
    assert misspelled.returncode == 1
    assert "human_approval.py approve STORE TOKEN NOTES" in err
