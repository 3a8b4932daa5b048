"""`unishard checkpoint`: list, inspect, verify, compare, convert and export checkpoints."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from unishard.cli.bar import bar
from unishard.cli.checkpoint_places import checkpoint_at, listed_at, listed_in
from unishard.cli.checkpoint_tables import (
    inspect_other,
    is_shown,
    object_of,
    row,
    show_checkpoint,
    show_comparison,
    table,
)
from unishard.cli.wrapping import echo, emit
from unishard.config.describe import count_of
from unishard.config.paths import url_of
from unishard.errors import CheckpointError

FOUND = 1
"""Exit status when a checkpoint is damaged or two differ; 2 is for errors."""

app = typer.Typer(
    help="List, verify, compare, convert and export checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="CKPT", help="A checkpoint, or a directory of checkpoints (uses the latest), or a URL."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(
    root: Annotated[Path, typer.Argument(metavar="ROOT", help="A directory of checkpoints, or a URL.")],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a directory.

    Marks the latest one, and lists incomplete ones left by killed runs.

    Example: unishard checkpoint list runs/llama
    """
    url = url_of(root)
    entries = listed_in(root) if url is None else listed_at(url)
    if as_json:
        emit(json.dumps(entries, indent=2))
    elif not entries:
        echo(f"no checkpoints in {url or root}")
    else:
        more = [name for name in ("run", "metric") if is_shown(name, entries)]
        table(
            ("step", "written", "ranks", "backend", "strategy", *more, "size", "state"),
            [row(checkpoint, more) for checkpoint in entries],
        )


@app.command()
def inspect(
    checkpoint: Checkpoint,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list each tensor: shape, dtype, hash.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the content of a checkpoint.

    For another tool's torch.distributed.checkpoint directory, shows its tensors.

    Example: unishard checkpoint inspect runs/llama --tensors
    """
    from unishard.checkpoint import finding, manifest

    if (checkpoint / ".metadata").is_file() and not finding.is_checkpoint(checkpoint):
        inspect_other(checkpoint, as_json)
        return
    with checkpoint_at(checkpoint, whole=False) as (folder, shown, size):
        facts = manifest.read(folder)
        if as_json:
            emit(json.dumps(object_of(shown, size(), facts, tensors), indent=2))
        else:
            show_checkpoint(shown, size(), facts, tensors)


@app.command()
def verify(
    checkpoint: Checkpoint,
    bits: Annotated[bool, typer.Option("--bits", help="Also read every tensor and check its hash.")] = False,
) -> None:
    """Check a checkpoint for damage.

    Compares the size and checksum of every file with the manifest. Exits with 0 if all match, with 1 and the names of
    damaged files if not, and with 2 if there is no checkpoint.

    Example: unishard checkpoint verify runs/llama --bits
    """
    from unishard.checkpoint import manifest, verifying

    with checkpoint_at(checkpoint) as (folder, shown, _):
        try:
            facts = manifest.read(folder)
        except CheckpointError as error:  # it exists, so it is damaged
            echo(str(error))
            raise typer.Exit(FOUND) from None
        with bar("files", sum(file.bytes for file in facts.files.values())) as advance:
            problems = verifying.damaged(folder, facts, advance=advance)
        if bits and not problems:
            from unishard.cli.checkpoint_facts import bytes_of

            with bar("tensors", sum(map(bytes_of, facts.tensors.values()))) as advance:
                problems = verifying.hashes_of(folder, facts, advance)
    for problem in problems:
        echo(problem.replace(str(folder), shown))
    if problems:
        raise typer.Exit(FOUND)
    also = f" and {count_of(len(facts.tensors), 'tensor')}" if bits else ""
    echo(f"{shown}: ok; {count_of(len(facts.files), 'file')}{also} match the manifest")


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of checkpoints, or a URL.")],
    b: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of checkpoints, or a URL.")],
) -> None:
    """Compare two checkpoints.

    Verifies all files of both, then compares their manifests (steps, ranks, configs, ...) and their tensors, with the
    largest differences. Exits with 0 if they are equal, with 1 if they differ, and with 2 if a checkpoint is damaged or
    cannot be read.

    Example: unishard checkpoint diff runs/a runs/b
    """
    from unishard.checkpoint import comparing

    with ExitStack() as stack:
        one, other = (stack.enter_context(checkpoint_at(place)).folder for place in (a, b))
        advance = stack.enter_context(bar("tensors", comparing.to_read(one, other)))
        comparison = comparing.compare(one, other, advance)
    if not any((comparison.facts, comparison.only_a, comparison.only_b, comparison.forms, comparison.values)):
        echo(f"equal: {count_of(comparison.tensors, 'tensor')}, and all metadata")
        return
    show_comparison(comparison)
    raise typer.Exit(FOUND)


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint of any tool, or a directory of unishard's (uses the latest), or a URL of these.",
        ),
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
            source if url_of(source) is None else stack.enter_context(checkpoint_at(source)).folder,
            destination,
            from_=from_,
            to=to,
            progress=lambda total: stack.enter_context(bar("converting", total)),
        )
    for note in notes:
        echo(f"note: {note}", err=True)
    emit(str(destination))


@app.command()
def export(
    checkpoint: Checkpoint,
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

    Example: unishard checkpoint export runs/llama exported --dtype bf16
    """
    from unishard.checkpoint.export.offline import export_checkpoint
    from unishard.cli.checkpoint_facts import size

    with ExitStack() as stack:
        folder, shown, _ = stack.enter_context(checkpoint_at(checkpoint))
        layout = export_checkpoint(
            folder,
            out,
            dtype,
            max_shard_size,
            tokenizer,
            model,
            progress=lambda total: stack.enter_context(bar(f"{folder.name} -> {out}", total)),
            overwrite=overwrite,
        )
    word = str(layout.dtype).removeprefix("torch.")
    echo(f"{out}: {count_of(len(layout.files), 'file')} of tensors, {size(layout.size)} in {word}, from {shown}")
    if layout.bare:
        echo(
            "no config.json written, because the checkpoint has none; add --model DIR, the directory with the model's "
            "config.json",
            err=True,
        )
