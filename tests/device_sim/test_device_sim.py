"""Two cells on the simulated CUDA device, in a process that has it; the rest is `make device-sim`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from simulated_cuda import building

ROOT = Path(__file__).resolve().parents[2]
LACKS = building.missing()


@pytest.mark.ranks
@pytest.mark.quick
@pytest.mark.skipif(LACKS is not None, reason=str(LACKS))
def test_a_cell_of_each_engine_trains_on_it_as_on_the_cpu():
    command = [sys.executable, "tests/device_sim/running.py", "-q", "-m", "quick"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " 2 passed" in found.stdout
