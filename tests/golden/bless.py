"""What every config in `configs/` becomes on every backend, and what `--help` says, kept as files.

After a change that is meant, write them anew and read the difference:

    python -m tests.golden.bless
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

import unishard
from unishard.cli import app

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[1] / "configs"
TOPOLOGY = unishard.Topology(world_size=8, local_world_size=4)
COMMANDS = (
    *("", "translate", "diff", "explain", "check", "init", "set", "migrate", "schema", "docs", "backends", "doctor", "demo", "export"),
    *("checkpoint", "checkpoint list", "checkpoint inspect", "checkpoint verify", "checkpoint diff", "checkpoint convert"),
)


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


def main() -> None:
    files = dict(expected())
    for stale in {*HERE.glob("native/*"), *HERE.glob("help/*")} - files.keys():
        stale.unlink()
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
