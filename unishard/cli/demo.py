"""`unishard demo`: the same tiny Llama on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo"]


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the curves and the figures go.")] = Path("demo-out"),
    world_size: Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks.")] = 2,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Number of updates.")] = 60,
) -> None:
    """Train a tiny Llama on each engine.

    One script and one config in which one word changes; the two loss curves are compared.
    """
    from unishard.demo import run_demo

    run_demo(out=out, world_size=world_size, steps=steps)
