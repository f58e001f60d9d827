"""`perdure worker` makes full collections rare and excludes what exists at the start."""

import gc

import pytest

from perdure.execution.collector_settings import THRESHOLDS, tune_collector


@pytest.fixture(autouse=True)
def restore_collector():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_existing_objects_are_excluded_and_full_collections_are_rare():
    tune_collector()
    assert gc.get_threshold() == THRESHOLDS
    assert gc.get_freeze_count() > 1_000


def test_cycles_of_user_code_are_still_collected():
    class Ring:
        def __init__(self) -> None:
            self.ring = self

    tune_collector()
    gc.collect()
    Ring()
    assert gc.collect(0) > 0
