"""`unishard checkpoint convert`: a checkpoint of another tool as one of unishard, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

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

    with _bar() as progress:
        notes = run(source, destination, from_=from_, to=to, progress=progress)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(str(destination))


@contextmanager
def _bar() -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A bar on standard error where that is a terminal, else nothing. Starts when the bytes that there are to write are known."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def start(total: int) -> Callable[[int], None]:
            task = bar.add_task("converting", total=total)
            return lambda written: bar.advance(task, written)

        yield start
