"""Runs tests on the simulated device: builds it, and starts pytest as a process that has two of them.

python tests/device_sim/on_device.py [what pytest takes]

Without files it runs all of `make device-sim`: the tests here, and those of tests/ranks that say what a user does on a
device.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from simulated_cuda import building  # noqa: E402

HERE_ALONE = "test_on_device_*.py"
OF_RANKS = (
    "test_cuda_devices.py",
    "test_evaluation.py::test_evaluation_needs_no_no_grad_and_leaves_no_graph",
    "test_checkpoint.py::test_a_save_in_the_background_holds_the_moment_of_its_call",
    "test_checkpoint_goes_on.py",
)
"""Tests for ranks that are played on the device too: with one for each rank, `run_ranks` takes it."""


def environment(place: Path, **variables: str) -> dict[str, str]:
    """This process's, with the device. The tests for ranks have models and loops that these use."""
    paths = [HERE, place, ROOT, ROOT / "backends", ROOT / "tests/ranks"]
    known = {
        name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")
    }
    return (
        known | {"DEVICE_SIM": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))} | variables
    )


def built() -> Path:
    """Build the extension in a process of its own, let it compute in another one, and say where it is.

    Raises:
        RuntimeError: The compiler refused, or this torch does not take the device.
    """
    place = Path(_said("-m", "simulated_cuda.building"))
    _said(
        "-c",
        "import torch; assert torch.ones(2, device='cuda').sum().item() == 2; print()",
        environment=environment(place),
    )
    return place


def _said(*arguments: str, environment: dict[str, str] | None = None) -> str:
    found = subprocess.run(
        [sys.executable, *arguments], cwd=HERE, env=environment, capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise RuntimeError(found.stderr[-4000:].rstrip())
    return found.stdout.splitlines()[-1]


def main(arguments: list[str]) -> int:
    if (why := building.missing()) is not None:
        sys.stderr.write(f"skipped: {why}\n")
        return 0
    try:
        place = built()
    except RuntimeError as refused:
        here = version("torch")
        known = here.startswith(building.TORCH)
        sys.stderr.write(
            f"{'failed' if known else 'skipped'}: the simulated device is not to be had with torch {here}:\n{refused}\n"
        )
        return int(known)
    quick = "quick" in arguments
    files = sorted(map(str, HERE.glob(HERE_ALONE))) + ([] if quick else [f"tests/ranks/{each}" for each in OF_RANKS])
    chosen = [] if any(each.startswith("tests/") for each in arguments) else files
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", *chosen, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        races = Path(folder, "races")
        code = subprocess.run(
            command, cwd=ROOT, env=environment(place, DEVICE_SIM_RACES=str(races)), check=False
        ).returncode
        if races.exists():
            sys.stderr.write(f"races that no test expects:\n{races.read_text()}")
            return 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
