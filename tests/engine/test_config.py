"""EngineConfig: a frozen value, each of its limits documented, bad ones refused."""

import dataclasses
import inspect
from datetime import timedelta

import pytest

from perdure import EngineConfig, Retry
from perdure.errors import InvalidArgument

DEFAULTS = {
    "lease": 15.0,
    "shards": 128,
    "sweep_interval": 5.0,
    "timer_resolution": 0.01,
    "resident_runs": 10_000,
    "max_concurrent_steps": 1_000,
    "max_recoveries": 10,
    "event_retention": 7 * 86_400.0,
    "max_pending_events": 10_000,
    "run_retention": 30 * 86_400.0,
    "grace": 10.0,
}


def test_the_defaults_are_those_of_the_contract():
    config = EngineConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert isinstance(config.store_retry, Retry)


def test_engine_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().lease = 5  # type: ignore[misc]


def test_timedeltas_read_back_as_seconds():
    config = EngineConfig(lease=timedelta(minutes=1), grace=timedelta(0))
    assert (config.lease, config.grace) == (60.0, 0.0)


def test_every_limit_is_documented():
    documented = {line.split()[0] for line in (inspect.getdoc(EngineConfig) or "").splitlines() if line}
    assert {field.name for field in dataclasses.fields(EngineConfig)} <= documented


@pytest.mark.parametrize("count", ["shards", "resident_runs", "max_concurrent_steps", "max_pending_events"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", True, None])
def test_invalid_counts_are_refused(count, value):
    with pytest.raises(InvalidArgument, match=f"EngineConfig.{count}"):
        EngineConfig(**{count: value})


def test_invalid_settings_are_refused():
    with pytest.raises(InvalidArgument, match="lease"):
        EngineConfig(lease=0)
    with pytest.raises(InvalidArgument, match="sweep_interval"):
        EngineConfig(sweep_interval=0)
    with pytest.raises(InvalidArgument, match="store_retry"):
        EngineConfig(store_retry=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="max_recoveries"):
        EngineConfig(max_recoveries=-1)
    with pytest.raises(TypeError):
        EngineConfig(colour="red")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "bad",
    [
        {"max_attempts": 0},
        {"factor": 0.5},
        {"factor": float("nan")},
        {"jitter": 1.5},
        {"jitter": -0.1},
        {"retry_on": "ValueError"},
        {"retry_on": (ValueError, "KeyError")},
    ],
)
def test_invalid_retries_are_refused(bad):
    with pytest.raises(InvalidArgument, match="Retry"):
        Retry(**bad)
