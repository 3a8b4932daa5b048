"""`unishard checkpoint convert`: a checkpoint of another tool as one of unishard, and back."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from unishard.cli.bar import bar

__all__ = ["convert"]


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A checkpoint of any tool, or a folder of unishard's: the latest.", show_default=False),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A folder that does not exist yet.", show_default=False)],
    from_: Annotated[str | None, typer.Option("--from", metavar="FORMAT", help="Its format. [default: recognised]")] = None,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="The format to write.")] = "unishard",
) -> None:
    """Convert a checkpoint of another tool, optimizer state included.

    Needs one process, no GPU and no model. Reads unishard, deepspeed, accelerate and dcp (a directory of torch.distributed.checkpoint);
    writes unishard, deepspeed-universal and dcp. Says on stderr what is left behind. DST appears when it is complete, or not at all.
    """
    from unishard.checkpoint.converting import convert as run

    with ExitStack() as stack:
        notes = run(source, destination, from_=from_, to=to, progress=lambda total: stack.enter_context(bar("converting", total)))
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(str(destination))
