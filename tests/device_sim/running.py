"""Runs tests on the simulated device: builds it, and starts pytest as a process that has two of them.

python tests/device_sim/running.py [what pytest takes]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from simulated_cuda import building  # noqa: E402

TESTS = "test_on_device_*.py"


def environment(place: Path, **variables: str) -> dict[str, str]:
    """This process's, with the device. The tests for ranks have models and loops that these use."""
    paths = [HERE, place, ROOT, ROOT / "backends", ROOT / "tests/ranks"]
    known = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")}
    return known | {"DEVICE_SIM": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))} | variables


def built() -> Path:
    """Build the extension in a process of its own, and say where it is.

    Raises:
        RuntimeError: The compiler refused.
    """
    command = [sys.executable, "-m", "simulated_cuda.building"]
    found = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(found.stderr[-4000:])
    return Path(found.stdout.splitlines()[-1])


def main(arguments: list[str]) -> int:
    if (why := building.missing()) is not None:
        sys.stderr.write(f"skipped: {why}\n")
        return 0
    files = [] if any(each.startswith("tests/") for each in arguments) else sorted(map(str, HERE.glob(TESTS)))
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", *files, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(built()), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
