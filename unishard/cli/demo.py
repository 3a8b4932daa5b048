"""`unishard demo`: train the same tiny Llama on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory for curves and figures.")] = Path(
        "demo-out"
    ),
    world_size: Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks.")] = 2,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Number of updates.")] = 60,
) -> None:
    """Train a tiny Llama on each engine.

    Runs one script with one config, changing only the backend, and compares the loss curves.

    Example: unishard demo --world-size 2 --steps 60
    """
    from unishard.tools.demo.comparison import run_demo

    run_demo(out=out, world_size=world_size, steps=steps)
