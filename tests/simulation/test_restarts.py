"""All guarantees hold while random clients restart runs, on simulated faults."""

import pytest

from tests.simulation.run_seed import simulate


@pytest.mark.parametrize("seed", range(20))
def test_guarantees_hold_while_clients_restart_runs(seed):
    result = simulate(seed, restarts=True)
    assert result.violations == [], "\n".join(result.trace[-60:])
    assert any("restart" in line and "created=True" in line for line in result.trace)
