"""What a translation on the command line costs, in seconds of CPU, beside its dependencies' imports and Accelerate's
own converter.

    python benchmarks/translate.py --runs 20

The commands take turns, so that other load on the machine affects all of them. Printed are median, smallest and
largest, and the median as a multiple of that of the imports: a translation takes at most 1.8 times their CPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
IMPORTS = "from pydantic import BaseModel, Field; import ruamel.yaml, typer"
"""`import pydantic` alone imports its parts only where they are used (pydantic 2.14)."""
FSDP1 = (
    "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 1\n  fsdp_sharding_strategy: FULL_SHARD\n"
)


def cpu(command: list[str]) -> float:
    """User and system seconds of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    unishard = [sys.executable, "-m", "unishard", "translate"]
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "fsdp1.yaml"
        old.write_text(FSDP1)
        new = str(Path(folder) / "fsdp2.yaml")
        accelerate = "from accelerate.commands.accelerate_cli import main; main()"
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            IMPORTS: [sys.executable, "-c", IMPORTS],
            "unishard translate (DeepSpeed to unishard)": [
                *unishard,
                str(CONFIGS / "ds_zero2.json"),
                "--to",
                "unishard",
            ],
            "unishard translate (Accelerate to DeepSpeed)": [
                *(*unishard, str(CONFIGS / "accelerate_fsdp.yaml"), "--to", "deepspeed", "--set", "backend=deepspeed"),
            ],
            "unishard translate (FSDP1 to FSDP2)": [*unishard, str(old), "--to", "accelerate"],
            "accelerate to-fsdp2 (FSDP1 to FSDP2)": [
                *(
                    sys.executable,
                    "-c",
                    accelerate,
                    "to-fsdp2",
                    "--config_file",
                    str(old),
                    "--output_file",
                    new,
                    "--overwrite",
                ),
            ],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(runs + 1):
            for name, command in commands.items():
                spent = cpu(command)
                if turn:  # the first writes bytecode and fills caches
                    seconds[name].append(spent)
    width = max(map(len, commands))
    for name, spent in seconds.items():
        middle = statistics.median(spent)
        ratio = middle / statistics.median(seconds[IMPORTS])
        print(
            f"{name:{width}}  {middle:.3f} s of CPU  ({min(spent):.3f} to {max(spent):.3f}, {len(spent)} runs), "
            f"{ratio:.2f} x imports"
        )


if __name__ == "__main__":
    main()
