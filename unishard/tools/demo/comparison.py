"""Runs the demo: trains on each engine, compares the curves and plots them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unishard.errors import BackendError
from unishard.tools.demo.curves import CurveGap, TrainingCurve
from unishard.tools.demo.plot import plot
from unishard.tools.demo.training import DemoError, train

BACKENDS = ("fsdp", "deepspeed")
TOLERANCE = 1e-4
_PACKAGES = ("torch", "transformers", "deepspeed", "matplotlib")


def run_demo(*, out: Path, world_size: int = 2, steps: int = 60) -> None:
    """Train the example on FSDP2 and on DeepSpeed ZeRO-3 with one word of the config changed, and compare.

    Prints the progress and a table, and leaves `fsdp.json`, `deepspeed.json` and `loss.png` in `out`.

    Args:
        out: Folder for the results; created if it does not exist.
        world_size: Ranks, all on this machine.
        steps: Updates of each run.

    Raises:
        BackendError: A package that the demo needs is not installed.
        DemoError: A run failed or left no curve, or the two curves differ by more than 1e-4 of the loss.
    """
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise BackendError(f"the demo needs {', '.join(missing)}, not installed here; pip install 'unishard[demo]'")

    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    runs = [
        train(backend, out / f"{backend}.json", world_size=world_size, steps=steps, console=console)
        for backend in BACKENDS
    ]
    gap = CurveGap.between(runs[0], runs[1])
    console.print(_table(runs))
    console.print(
        f"largest difference of the two curves: {gap.absolute:.1e} ({gap.relative:.1e} of the loss) at step {gap.step} "
        f"of {steps}",
        highlight=False,
        soft_wrap=True,
    )
    picture = out / "loss.png"
    plot(runs[0], runs[1], picture)
    console.print(f"curves: {picture}", highlight=False, soft_wrap=True)
    if not gap.relative <= TOLERANCE:  # also when it is not a number
        losses = " and ".join(f"{run.backend} has loss {run.losses[gap.step - 1]:.6f}" for run in runs)
        raise DemoError(
            f"the curves should agree, but at step {gap.step} {losses}; in fp32 they may differ by {TOLERANCE:.0e} of "
            "the "
            "loss. One of the engines does not do what the config asks for: please report it with the two JSON files"
        )


def _table(runs: list[TrainingCurve]) -> Table:
    table = Table(title=f"One script, one config, world size {runs[0].ranks}")
    for heading in ("backend", "first loss", "last loss", "median step", "peak memory of each rank"):
        table.add_column(heading, justify="left" if heading == "backend" else "right")
    for run in runs:
        memory = ", ".join(f"{size / 2**20:.0f}" for size in run.peak_memory_bytes) + " MiB"
        table.add_row(
            run.backend,
            f"{run.losses[0]:.6f}",
            f"{run.losses[-1]:.6f}",
            f"{1e3 * run.median_step_seconds:.0f} ms",
            memory,
        )
    return table
