"""`unishard checkpoint`: list, inspect, verify, compare and convert checkpoints."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unishard.cli.report import plain, value_of
from unishard.cli.wrapping import echo, emit, is_narrow, show, show_blocks
from unishard.config.describe import count_of
from unishard.errors import CheckpointError, in_one_line

if TYPE_CHECKING:
    from unishard.checkpoint.manifest import Manifest
    from unishard.checkpoint.verifying import Comparison

FOUND = 1
"""Exit status when a checkpoint is damaged or two differ; 2 is for errors."""

app = typer.Typer(
    help="List, inspect, verify, compare and convert checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="CKPT", help="A checkpoint, or a directory of checkpoints (uses the latest)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(
    root: Annotated[Path, typer.Argument(metavar="ROOT", help="A directory of checkpoints.")],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a directory.

    Marks the latest one, and lists incomplete ones left by killed runs.

    Example: unishard checkpoint list runs/llama
    """
    from unishard.checkpoint import finding

    if not root.is_dir():
        raise CheckpointError(f"{root}: directory not found; name a directory of checkpoints")
    if finding.is_checkpoint(root):
        raise CheckpointError(
            f"{root}: is a single checkpoint; name its parent directory, or run `unishard checkpoint inspect`"
        )
    latest = finding.latest(root)
    found = [_listed(each.path, each.step, latest) for each in finding.checkpoints(root)]
    found += [_left_over(root / name) for name in finding.incomplete(root)]
    if as_json:
        emit(json.dumps(found, indent=2))
    elif not found:
        echo(f"no checkpoints in {root}")
    else:
        more = [name for name in ("run", "metric") if _is_shown(name, found)]
        _table(
            ("step", "written", "ranks", "backend", "strategy", *more, "size", "state"),
            [_row(each, more) for each in found],
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
        _inspect_other(checkpoint, as_json)
        return
    folder = finding.locate(checkpoint)
    facts = manifest.read(folder)
    if as_json:
        emit(json.dumps(_object(folder, facts, tensors), indent=2))
    else:
        _show(folder, facts, tensors)


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
    from unishard.checkpoint import finding, manifest, verifying

    folder = finding.locate(checkpoint)
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
        echo(problem)
    if problems:
        raise typer.Exit(FOUND)
    also = f" and {count_of(len(facts.tensors), 'tensor')}" if bits else ""
    echo(f"{folder}: ok; {count_of(len(facts.files), 'file')}{also} match the manifest")


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of checkpoints.")],
    b: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of checkpoints.")],
) -> None:
    """Compare two checkpoints.

    Verifies all files of both, then compares their manifests (steps, ranks, configs, ...) and their tensors, with the
    largest differences. Exits with 0 if they are equal, with 1 if they differ, and with 2 if a checkpoint is damaged or
    cannot be read.

    Example: unishard checkpoint diff runs/a runs/b
    """
    from unishard.checkpoint import finding, verifying

    folders = finding.locate(a), finding.locate(b)
    with bar("tensors", verifying.to_read(*folders)) as advance:
        found = verifying.compare(*folders, advance)
    if not any((found.facts, found.only_a, found.only_b, found.forms, found.values)):
        echo(f"equal: {count_of(found.tensors, 'tensor')}, and all metadata")
        return
    _show_comparison(found)
    raise typer.Exit(FOUND)


@app.command()
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


# -- shown -----------------------------------------------------------------------------------------


def _listed(path: Path, step: int, latest: Path | None) -> dict[str, Any]:
    from unishard.checkpoint import manifest
    from unishard.cli.checkpoint_facts import place_of, size_of

    entry: dict[str, Any] = {
        "name": path.name,
        "step": step,
        "state": "complete",
        "latest": path == latest,
        "bytes": size_of(path),
    }
    try:
        facts = manifest.read(path)
    except CheckpointError:
        return entry | {"state": "manifest is damaged"}
    backend, strategy = place_of(facts)
    entry |= {
        "written": facts.written,
        "world_size": facts.world_size,
        "backend": backend or None,
        "strategy": strategy or None,
    }
    return entry | {"run": facts.run, "metric": facts.metric}


def _is_shown(column: str, found: Sequence[dict[str, Any]]) -> bool:
    """Whether a column tells something: a metric, and the run where there are several."""
    values = {entry.get(column) for entry in found if entry["state"] == "complete"}
    return len(values) > 1 if column == "run" else bool(values - {None})


def _left_over(path: Path) -> dict[str, Any]:
    from unishard.cli.checkpoint_facts import size_of

    step = re.search(r"step-(\d+)", path.name)
    return {
        "name": path.name,
        "step": int(step[1]) if step else None,
        "state": "incomplete",
        "latest": False,
        "bytes": size_of(path),
    }


def _row(entry: dict[str, Any], more: Sequence[str]) -> tuple[str, ...]:
    from unishard.cli.checkpoint_facts import local, size

    state = entry["state"] + (", latest" if entry["latest"] else "")
    if entry["state"] == "incomplete":
        state = f"incomplete: {entry['name']}"
    cells = (
        "" if entry.get(name) is None else str(entry[name]) for name in ("step", "world_size", "backend", "strategy")
    )
    step, ranks, backend, strategy = cells
    own = [f"{value:.6g}" if isinstance(value := entry.get(name), float) else value or "" for name in more]
    return step, local(entry.get("written", "")), ranks, backend, strategy, *own, size(entry["bytes"]), state


def _object(folder: Path, facts: Manifest, tensors: bool) -> dict[str, Any]:
    from unishard.cli.checkpoint_facts import kinds_of, size_of

    said = plain(facts.model_dump(exclude={"crc32"} if tensors else {"crc32", "files", "tensors"}))
    return {
        "path": str(folder),
        "bytes": size_of(folder),
        **said,
        "kinds": [plain(kind._asdict()) for kind in kinds_of(facts)],
    }


def _show(folder: Path, facts: Manifest, tensors: bool) -> None:
    from unishard.cli.checkpoint_facts import facts_of, groups_of, kinds_of, size

    show(("fact", "value"), list(facts_of(folder, facts)), sys.stdout)
    kinds = kinds_of(facts)
    rows = [
        (kind.name, str(kind.tensors), f"{kind.numel:,}", size(kind.bytes), " ".join(kind.dtypes)) for kind in kinds
    ]
    _table(("kind", "tensors", "elements", "size", "dtypes"), rows, apart=True)
    _table(("norm of", "L2"), [(name, f"{norm:.6g}") for name, norm in facts.norms.items()], apart=True)
    _table(("group", "parameters", "lr", "options"), groups_of(facts), apart=True)
    if tensors:
        forms = [(name, str(each.shape), each.dtype, each.hash) for name, each in facts.tensors.items()]
        _table(("tensor", "shape", "dtype", "hash"), forms, apart=True)


def _inspect_other(folder: Path, as_json: bool) -> None:
    """Show a torch.distributed.checkpoint directory without our manifest."""
    from unishard.checkpoint.tensor_reader import Tensors

    found = Tensors(folder)
    forms = {name: (list(found.shapes[name]), str(found.dtypes[name]).removeprefix("torch.")) for name in found}
    if as_json:
        tensors = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in forms.items()}
        said = {
            "path": str(folder),
            "format": "torch.distributed.checkpoint",
            "tensors": tensors,
            "pickles": sorted(found.others),
        }
        emit(json.dumps(said, indent=2))
        return
    echo(
        f"{folder}: a torch.distributed.checkpoint directory without a unishard manifest; "
        "make it a unishard checkpoint with `unishard checkpoint convert`"
    )
    rows = [(name, str(shape), dtype) for name, (shape, dtype) in forms.items()]
    _table(
        ("tensor", "shape", "dtype"),
        [*rows, *((name, "", "pickle, not opened") for name in sorted(found.others))],
        apart=True,
    )


def _show_comparison(found: Comparison) -> None:
    facts = [(path, value_of(one), value_of(other)) for path, one, other in (*found.facts, *found.forms)]
    facts += [(name, "present", "missing") for name in found.only_a] + [
        (name, "missing", "present") for name in found.only_b
    ]
    _table(("what", "A", "B"), facts)
    gaps = [
        (gap.name, f"{gap.differing:,} of {gap.numel:,}", f"{gap.absolute:.3g}", f"{gap.relative:.3g}")
        for gap in found.values
    ]
    _table(("tensor", "elements that differ", "largest difference", "relative"), gaps, apart=bool(facts))
    same = found.tensors - len(found.forms) - len(found.values)
    echo(f"\n{same} of {found.tensors} common tensors are equal")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, apart: bool = False) -> None:
    """Print a table, or nothing if there are no rows."""
    if not rows:
        return
    rows = [[in_one_line(cell) for cell in row] for row in rows]
    if apart:
        echo()
    if is_narrow(min(len(columns), 4), sys.stdout):
        show_blocks(
            ((row[0], [pair for pair in zip(columns[1:], row[1:], strict=True) if pair[1]]) for row in rows), sys.stdout
        )
    else:
        show(columns, rows, sys.stdout)


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, if that is a terminal, and remove it at the end.

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
