"""`unishard checkpoint convert`: a checkpoint of another tool as one of unishard, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["convert"]


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The directory of a checkpoint of any known tool.", show_default=False)],
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


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:  # until unishard.cli.bar is there
    """Show on standard error how many bytes are done, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
