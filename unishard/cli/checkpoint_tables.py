"""What `unishard checkpoint` shows of checkpoints."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unishard.cli.report import plain
from unishard.cli.tables import is_narrow, show, show_blocks
from unishard.cli.text_report import value_of
from unishard.cli.wrapping import echo, emit
from unishard.errors import CheckpointError, in_one_line

if TYPE_CHECKING:
    from unishard.checkpoint.comparing import Comparison
    from unishard.checkpoint.manifest import Manifest


def listed(path: Path, step: int, latest: Path | None) -> dict[str, Any]:
    """A complete checkpoint, as an object of `unishard checkpoint list --json`."""
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


def is_shown(column: str, entries: Sequence[dict[str, Any]]) -> bool:
    """Whether a column is useful: that of a metric if there is one, that of the run if there are several."""
    values = {entry.get(column) for entry in entries if entry["state"] == "complete"}
    return len(values) > 1 if column == "run" else bool(values - {None})


def left_over(path: Path) -> dict[str, Any]:
    """An incomplete checkpoint, as the same kind of object."""
    from unishard.cli.checkpoint_facts import size_of

    step = re.search(r"step-(\d+)", path.name)
    return {
        "name": path.name,
        "step": int(step[1]) if step else None,
        "state": "incomplete",
        "latest": False,
        "bytes": size_of(path),
    }


def row(entry: dict[str, Any], more: Sequence[str]) -> tuple[str, ...]:
    """The object of a checkpoint as a row of a table."""
    from unishard.cli.checkpoint_facts import local, size

    state = entry["state"] + (", latest" if entry["latest"] else "")
    if entry["state"] == "incomplete":
        state = f"incomplete: {entry['name']}"
    cells = (
        "" if entry.get(name) is None else str(entry[name]) for name in ("step", "world_size", "backend", "strategy")
    )
    step, ranks, backend, strategy = cells
    extra = [f"{value:.6g}" if isinstance(value := entry.get(name), float) else value or "" for name in more]
    return step, local(entry.get("written", "")), ranks, backend, strategy, *extra, size(entry["bytes"]), state


def object_of(shown: str, size: int, facts: Manifest, tensors: bool) -> dict[str, Any]:
    """A checkpoint, as the object of `unishard checkpoint inspect --json`."""
    from unishard.cli.checkpoint_facts import kinds_of

    manifest_values = plain(facts.model_dump(exclude={"crc32"} if tensors else {"crc32", "files", "tensors"}))
    return {
        "path": shown,
        "bytes": size,
        **manifest_values,
        "kinds": [plain(kind._asdict()) for kind in kinds_of(facts)],
    }


def show_checkpoint(shown: str, bytes_of_files: int, facts: Manifest, tensors: bool) -> None:
    """Print what a checkpoint holds."""
    from unishard.cli.checkpoint_facts import facts_of, groups_of, kinds_of, size

    show(("fact", "value"), list(facts_of(shown, bytes_of_files, facts)), sys.stdout)
    kinds = kinds_of(facts)
    rows = [
        (kind.name, str(kind.tensors), f"{kind.numel:,}", size(kind.bytes), " ".join(kind.dtypes)) for kind in kinds
    ]
    table(("kind", "tensors", "elements", "size", "dtypes"), rows, apart=True)
    table(("norm of", "L2"), [(name, f"{norm:.6g}") for name, norm in facts.norms.items()], apart=True)
    table(("group", "parameters", "lr", "options"), groups_of(facts), apart=True)
    if tensors:
        forms = [(name, str(tensor.shape), tensor.dtype, tensor.hash) for name, tensor in facts.tensors.items()]
        table(("tensor", "shape", "dtype", "hash"), forms, apart=True)


def inspect_other(folder: Path, as_json: bool) -> None:
    """Show a torch.distributed.checkpoint directory without our manifest."""
    from unishard.checkpoint.tensor_reader import Tensors

    stored = Tensors(folder)
    forms = {name: (list(stored.shapes[name]), str(stored.dtypes[name]).removeprefix("torch.")) for name in stored}
    if as_json:
        tensors = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in forms.items()}
        description = {
            "path": str(folder),
            "format": "torch.distributed.checkpoint",
            "tensors": tensors,
            "pickles": sorted(stored.others),
        }
        emit(json.dumps(description, indent=2))
        return
    echo(
        f"{folder}: a torch.distributed.checkpoint directory without a unishard manifest; "
        "make it a unishard checkpoint with `unishard checkpoint convert`"
    )
    rows = [(name, str(shape), dtype) for name, (shape, dtype) in forms.items()]
    table(
        ("tensor", "shape", "dtype"),
        [*rows, *((name, "", "pickle, not opened") for name in sorted(stored.others))],
        apart=True,
    )


def show_comparison(comparison: Comparison) -> None:
    """Print the differences between two checkpoints."""
    facts = [(path, value_of(one), value_of(other)) for path, one, other in (*comparison.facts, *comparison.forms)]
    facts += [(name, "present", "missing") for name in comparison.only_a] + [
        (name, "missing", "present") for name in comparison.only_b
    ]
    table(("what", "A", "B"), facts)
    gaps = [
        (gap.name, f"{gap.differing:,} of {gap.numel:,}", f"{gap.absolute:.3g}", f"{gap.relative:.3g}")
        for gap in comparison.values
    ]
    table(("tensor", "elements that differ", "largest difference", "relative"), gaps, apart=bool(facts))
    same = comparison.tensors - len(comparison.forms) - len(comparison.values)
    echo(f"\n{same} of {comparison.tensors} common tensors are equal")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, apart: bool = False) -> None:
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
