"""`unishard export`: write a checkpoint's weights in Hugging Face layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unishard.cli.wrapping import echo
from unishard.config.describe import count_of


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CKPT", help="A checkpoint, or a directory of checkpoints (uses the latest)."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output directory, empty or new.")],
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="fp32, bf16 or fp16. [default: from the model's config, else fp32]"),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of one file.")] = "5GB",
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the tokenizer. [default: the checkpoint's, if any]"),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the model's config.json, for a converted checkpoint."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in OUT.")] = False,
) -> None:
    """Write a checkpoint's weights in Hugging Face layout.

    Writes safetensors with config.json, generation_config.json and the tokenizer, or PEFT adapters, from either engine.
    Runs in one process, without a GPU, and keeps only small blocks in memory.

    Example: unishard export runs/llama exported --dtype bf16
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from unishard.checkpoint.export.offline import export_checkpoint
    from unishard.checkpoint.finding import locate
    from unishard.cli.checkpoint_facts import size

    folder = locate(checkpoint)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{folder.name} -> {out}", total=None)
        layout = export_checkpoint(
            folder,
            out,
            dtype,
            max_shard_size,
            tokenizer,
            model,
            start=lambda total: progress.update(task, total=total),
            advance=lambda written: progress.advance(task, written),
            overwrite=overwrite,
        )
    word = str(layout.dtype).removeprefix("torch.")
    echo(f"{out}: {count_of(len(layout.files), 'file')} of tensors, {size(layout.size)} in {word}, from {folder}")
    if layout.bare:
        echo(
            "no config.json written, because the checkpoint has none; add --model DIR, the directory with the model's "
            "config.json",
            err=True,
        )
