"""The examples are complete programs: they run as they are, survive being killed, and do what they say."""

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
SECTIONS = ["facts", "structure", "style", "summary"]


def program(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(*arguments: str | Path, told: str = "") -> str:
    running = program(*arguments)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, out + err
    assert err == told
    return out


# --- a shared workspace


@pytest.fixture
def workspace(tmp_path):
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("words")
    return tmp_path


def sections(workspace: Path) -> list[str]:
    return sorted(re.findall(r"^## (\w+)$", (workspace / "report.md").read_text(), re.MULTILINE))


def test_agents_that_write_to_one_report_lose_nothing():
    shown = output(WORKSPACE)
    assert shown.startswith("A new report:\n")
    assert sorted(re.findall(r"^## (\w+)$", shown, re.MULTILINE)) == SECTIONS
    assert "3 agents have read 2 files." in shown


def test_they_think_at_the_same_time_and_write_one_after_the_other(workspace):
    shown = output(WORKSPACE, workspace)
    thinking = [line.strip() for line in shown.splitlines() if "is thinking" in line]
    writing = [line.strip() for line in shown.splitlines() if "is written" in line]
    assert len(thinking) == 3
    assert shown.index(thinking[-1]) < shown.index(writing[0])
    assert [line.partition(":")[0] for line in writing] == [
        *(f"agents/{role}/add_section" for role in ("structure", "style", "facts")),
        "add_section",
    ]


def test_a_report_that_is_done_is_not_written_again(workspace):
    output(WORKSPACE, workspace)
    again = output(WORKSPACE, workspace)
    assert again.startswith("This report was begun before:\n3 agents have read 2 files.\n")
    assert "is thinking" not in again


def test_a_report_whose_program_is_killed_is_finished_by_the_next(workspace):
    first = program(WORKSPACE, workspace)
    assert first.stdout is not None
    for line in first.stdout:
        if "agents/structure/add_section" in line:  # the second agent has the lock now, and the third waits for it
            break
    first.kill()
    first.communicate()
    again = output(WORKSPACE, workspace, told="took over from 1 workers that are gone: 1 runs go on\n")
    assert again.startswith("This report was begun before:")
    assert "is thinking" not in again, "what the agents have answered is recorded"
    assert sections(workspace) == SECTIONS


# --- a review


def test_a_text_is_approved_by_another_process_while_nobody_works_on_it():
    begun, _, rest = output(REVIEW).partition("It has ended. Another one is the reviewer:\n")
    agents = re.findall(r"^  (\S+)$", begun, re.MULTILINE)
    assert agents[0] == "draft_agent"
    assert sorted(agents[1:3]) == ["critics/facts/critic_agent", "critics/style/critic_agent"]
    assert agents[3:] == ["refine_agent", "notify_reviewer"]
    approved, finished = rest.split("A third one does the rest:\n")
    assert approved == "approved\n"
    assert re.findall(r"^  (\S+)$", finished, re.MULTILINE) == ["finalize_agent"], "nothing was done twice"
    assert finished.splitlines()[-1] == (
        "draft of 'the home page', refined by 2 opinions, final after 'shorter, please'"
    )


@pytest.fixture
def waiting(tmp_path):
    """A text that waits for its reviewer: where the store is, where the desk is, and the token."""
    url = f"sqlite:///{tmp_path / 'runs.db'}"
    output(REVIEW, "begin", url, tmp_path, "a poem")
    return url, tmp_path, json.loads((tmp_path / "desk.json").read_text())["token"]


def test_a_rejected_text_is_not_finalized(waiting):
    url, desk, token = waiting
    assert output(REVIEW, "reject", url, token, "no rhymes") == "rejected\n"
    assert output(REVIEW, "finish", url, desk, "a poem") == "rejected: no rhymes\n"


def test_the_first_decision_stands(waiting):
    url, desk, token = waiting
    output(REVIEW, "reject", url, token, "no rhymes")
    assert output(REVIEW, "approve", url, token, "fine") == "too late: this was decided before\n"
    assert output(REVIEW, "finish", url, desk, "a poem") == "rejected: no rhymes\n"


def test_a_forged_token_decides_nothing(waiting):
    url, _, token = waiting
    forged = program(REVIEW, "approve", url, token[:-2] + "AA", "fine")
    _, err = forged.communicate(timeout=60)
    assert forged.returncode == 1
    assert err.startswith("refused: ")
    assert output(REVIEW, "reject", url, token, "no") == "rejected\n"


def test_a_call_that_makes_no_sense_explains_itself():
    asked = program(REVIEW, "aprove")
    _, err = asked.communicate(timeout=60)
    assert asked.returncode == 1
    assert "human_approval.py approve STORE TOKEN NOTES" in err
