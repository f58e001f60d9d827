"""Commands schedules ls, show, pause, resume, trigger, backfill, delete, preview, prune."""

from datetime import UTC, datetime, timedelta

from tests.cli.cli_runner import shape_of

DECLARING = """
from perdure import Context, Schedule, workflow

@workflow(schedule=Schedule(cron="0 3 1 1 *", note="yearly"))
async def yearly(ctx: Context) -> None: ...

workflows = [yearly]
"""


def create(shop, schedule_id="nightly", **options):
    """Create a schedule of a workflow that the shop's code defines."""
    options = {"cron": "0 2 1 1 *", "tz": "Europe/Berlin", "overlap": "allow", **options}

    async def call(client):
        await client.schedule(schedule_id, "review", {"title": "a"}, **options)

    with shop.worker():
        shop.call(call)


def test_schedules_are_listed_shown_paused_resumed_triggered_and_deleted(shop):
    shop.create_store()
    assert "No schedules found." in shop.run("schedules", "ls").stdout
    create(shop)
    create(shop, "weekly", cron="@weekly", note="a note")
    page = shop.json("schedules", "ls", "--limit", "1")
    assert ([each["id"] for each in page["schedules"]], page["next"]) == (["nightly"], "nightly")
    assert shape_of(page["schedules"][0])["rule"] == "cron '0 2 1 1 *' Europe/Berlin (At 02:00 on January 1)"
    assert "weekly" in shop.run("schedules", "ls", "--after", "nightly").stdout
    assert shop.json("schedules", "pause", "nightly", "--reason", "holidays") == {"id": "nightly", "paused": True}
    shown = shop.run("schedules", "show", "nightly").stdout
    assert "holidays" in shown
    assert "0 started, 0 skipped, 0 missed, 0 conflicts, 0 triggered" in shown
    assert "paused" in shop.run("schedules", "ls").stdout
    assert shop.json("schedules", "resume", "nightly") == {"id": "nightly", "paused": False}
    triggered = shop.json("schedules", "trigger", "nightly")
    assert triggered["created"] is True
    assert triggered["run"].startswith("nightly/now-")
    assert shop.json("schedules", "show", "nightly")["schedule"]["triggered"] == 1
    assert shop.json("schedules", "delete", "nightly", "--yes") == {"id": "nightly", "deleted": True}
    shop.run("schedules", "show", "nightly", code=3)
    shop.run("schedules", "delete", "nightly", "--yes", code=3)
    shop.run("schedules", "trigger", "nightly", code=3)


def test_backfill_starts_an_internal_run(shop):
    shop.create_store()
    create(shop, cron="@hourly")
    started = shop.json("schedules", "backfill", "nightly", "5h", "1h", "--overlap", "allow")
    assert started["run"].startswith("~backfill/")
    with shop.worker():
        shop.until(started["run"], "succeeded")
    assert len(shop.json("ls", "--prefix", "nightly/")["runs"]) == 4
    assert shop.json("ls", "--workflow", "~backfill")["runs"] == []
    shop.run("schedules", "backfill", "nightly", "1h", "5h", code=2)


def test_preview_reads_no_store(shop):
    slots = shop.json("schedules", "preview", "30 2 * * *", "--tz", "Europe/Berlin", "-n", "2", "--after", "2026-03-28")
    assert slots == {"slots": ["2026-03-28T02:30:00+01:00", "2026-03-29T03:00:00+02:00"]}
    text = shop.run("schedules", "preview", "0 9 * * 1", "--after", "2026-11-18", "-n", "1")
    assert "Mon 2026-11-23 09:00:00 +0000" in text.stdout
    assert "At 09:00 on Monday" in text.stderr
    refused = shop.run("schedules", "preview", "61 * * * *", code=2)
    assert "invalid field minute" in refused.stderr


def test_prune_deletes_schedules_that_the_code_does_not_declare(shop):
    (shop.folder / "declaring.py").write_text(DECLARING)
    with shop.worker("declaring:workflows"):
        pass
    create(shop)
    assert shop.json("schedules", "show", "yearly")["schedule"]["declared_by"] == "declaring.yearly"
    assert shop.json("schedules", "prune", "--app", "declaring", "--yes") == {"deleted": []}
    found = shop.json("doctor", "--app", "shop")["findings"]
    assert [(each["kind"], each["subject"]) for each in found] == [("undeclared_schedule", "yearly")]
    assert shop.json("schedules", "prune", "--app", "shop", "--yes") == {"deleted": ["yearly"]}
    assert [each["id"] for each in shop.json("schedules", "ls")["schedules"]] == ["nightly"]


def test_shell_completion_names_schedules(shop):
    shop.create_store()
    create(shop)
    completed = shop.run(
        "schedules",
        "show",
        code=0,
        _PERDURE_COMPLETE="complete_bash",
        COMP_WORDS="perdure schedules show ",
        COMP_CWORD="3",
    )
    assert completed.stdout.split() == ["nightly"]


def test_times_of_a_backfill_are_durations_or_times(shop):
    shop.create_store()
    create(shop, cron="@hourly")
    now = datetime.now(UTC).replace(microsecond=0)
    shop.json("schedules", "backfill", "nightly", (now - timedelta(hours=2)).isoformat(), now.isoformat())
