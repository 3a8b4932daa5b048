"""`unishard checkpoint convert`: convert checkpoints of other tools to unishard's, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from unishard.cli.wrapping import echo, emit

# -- A progress bar on stderr, if it is a terminal -------------------------------------------------


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar and remove it at the end.

    Args:
        what: Label.
        total: Total bytes.

    Yields:
        A function that takes the number of bytes processed since the last call.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="A checkpoint of any tool, or a directory of unishard's (uses the latest)."),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A directory that does not exist yet.")],
    from_: Annotated[
        str | None, typer.Option("--from", metavar="FORMAT", help="Format of SRC. [default: detected]")
    ] = None,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="The format to write.")] = "unishard",
) -> None:
    """Convert a checkpoint of another tool, optimizer state included.

    Runs in one process, without a GPU or the model. Reads unishard, deepspeed, accelerate and dcp (a
    torch.distributed.checkpoint directory); writes unishard, deepspeed-universal and dcp. Reports on stderr what was
    not converted. DST only appears once complete.

    Example: unishard checkpoint convert ds_checkpoint runs/step-00000100
    """
    from unishard.checkpoint.convert import convert as run

    with ExitStack() as stack:
        notes = run(
            source,
            destination,
            from_=from_,
            to=to,
            progress=lambda total: stack.enter_context(bar("converting", total)),
        )
    for note in notes:
        echo(f"note: {note}", err=True)
    emit(str(destination))
