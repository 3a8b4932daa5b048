"""What every config in `configs/` becomes on every backend, what `--help` says, and the jobs of `unishard launch`, kept
as files. After a change that is meant, write them anew and read the difference: `pytest tests/golden --bless`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

import unishard
from unishard.cli import app
from unishard.config.loading.launched import variables
from unishard.tools.launch.command import Script
from unishard.tools.launch.slurm import batch_script

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs"
TOPOLOGY = unishard.Topology(world_size=8, local_world_size=4)
FOLDERS = ("native", "help", "launch")
COMMANDS = (
    "",
    *get_command(app).commands,  # type: ignore[attr-defined]  # a group
    *("checkpoint list", "checkpoint inspect", "checkpoint verify", "checkpoint diff", "checkpoint convert"),
    "checkpoint export",
)


CLUSTER = {
    "checkpoint": {"dir": "/data/runs/llama", "on_existing": "resume", "every_steps": 500, "on_signal": ["USR1"]},
    "launch": {
        "nodes": "2:4",
        "processes_per_node": 8,
        "max_restarts": 3,
        "environment": {"NCCL_DEBUG": "INFO"},
        "slurm": {
            "partition": "gpu",
            "gpus-per-node": 8,
            "time": "4:00:00",
            "signal": "USR1@300",
            "setup": "module load cuda",
        },
    },
}


def expected() -> Iterator[tuple[Path, str]]:
    """Each golden file and what it should hold."""
    for config in sorted(CONFIGS.glob("*.yaml")):
        for backend in ("deepspeed", "fsdp"):
            native = unishard.translate(unishard.load(config), backend=backend, topology=TOPOLOGY).native
            yield HERE / "native" / f"{config.stem}.{backend}.json", json.dumps(native, indent=2) + "\n"
    for command in COMMANDS:
        result = CliRunner().invoke(
            app, [*command.split(), "--help"], prog_name="unishard", env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"}
        )
        yield HERE / "help" / f"{command.replace(' ', '-') or 'unishard'}.txt", result.stdout
    yield from _jobs()


def _jobs() -> Iterator[tuple[Path, str]]:
    """The jobs that `unishard launch` writes."""
    cfg, script = unishard.load(CLUSTER), Script("train.py", ("--epochs", "3"))
    told = variables("/data/cfg.yaml", ["training.seed=1"])
    yield HERE / "launch" / "slurm.sh", batch_script(cfg, script, told, "train")
