"""Finds checkpoints under a root, also after a killed run. Changes nothing. The names are explained in `directory`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from unishard.checkpoint import manifest as manifests
from unishard.checkpoint.files import read_bytes
from unishard.checkpoint.headers import header_of
from unishard.errors import CheckpointError

LATEST = "latest"
"""The file that names the last committed checkpoint."""
_LONGEST = 4096
"""Bytes of that file."""
STEP = re.compile(r"step-(?P<step>\d{8,})(?:-(?P<run>[0-9a-f]{8}))?")
"""The name of a checkpoint; with the run if it began beside checkpoints of another one."""
LEFT_OVER = re.compile(
    r"\.(?P<kind>tmp|old|trash)-(?P<name>step-(?P<step>\d{8,})(?:-[0-9a-f]{8})?)-[0-9a-f]{32}|\.(?:latest|owner)-[0-9a-f]{32}"
)
"""Names of temporary directories and files: being written, replaced or deleted."""


_WEIGHTS = (
    "weights are loaded before unishard.prepare, as in model.load_state_dict(torch.load(path)) or "
    "unishard.from_pretrained(cls, folder, cfg), and engine.load reads what engine.save has written"
)
_WEIGHT_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_HELD = {
    "*.safetensors": f"it holds weights of transformers; {_WEIGHTS}",
    "pytorch_model*.bin": f"it holds weights of transformers; {_WEIGHTS}",
    **dict.fromkeys(
        ("mp_rank_*", "*/mp_rank_*", "zero_pp_rank_*", "*/zero_pp_rank_*"),
        "it holds a checkpoint of DeepSpeed; convert it with `unishard checkpoint convert`",
    ),
}
"""What a folder without checkpoints of unishard may hold, as a pattern, and what to do."""


class FoundCheckpoint(NamedTuple):
    """A complete checkpoint."""

    path: Path
    """Its directory."""
    step: int
    name: str
    """The name of its directory, also while that has another one because it is being replaced."""


def name_of(step: int, beside: str = "") -> str:
    """The name of the directory of a step's checkpoint.

    Args:
        step: The step.
        beside: The run, if it began beside checkpoints of another one, which may have the same steps.
    """
    return f"step-{step:08d}" + (f"-{beside}" if beside else "")


def is_checkpoint(folder: Path) -> bool:
    """Whether a directory is a complete checkpoint."""
    return (folder / manifests.FILE).is_file()


def checkpoints(root: Path) -> list[FoundCheckpoint]:
    """The complete checkpoints, by ascending step; empty if the root does not exist.

    Raises:
        CheckpointError: The root is a file, or cannot be read.
    """
    by_name = {old.name: old for old in set_aside(root)}
    for entry in entries(root):
        if (match := STEP.fullmatch(entry)) and is_checkpoint(root / entry):
            by_name[entry] = FoundCheckpoint(root / entry, int(match["step"]), entry)
    return sorted(by_name.values(), key=lambda checkpoint: (checkpoint.step, checkpoint.name))


def incomplete(root: Path) -> list[str]:
    """Names of incomplete directories and files: left by a killed run, or being written by a running one.

    Raises:
        CheckpointError: The root is a file, or cannot be read.
    """
    complete = {checkpoint.path.name for checkpoint in checkpoints(root)}
    return [
        name for name in entries(root) if name not in complete and (LEFT_OVER.fullmatch(name) or STEP.fullmatch(name))
    ]


def latest(root: Path) -> Path | None:
    """The checkpoint to resume from; None if there is none.

    This is the one that was committed last, which need not have the highest step: a run may have resumed from an
    earlier one, or have begun beside an older run. The file `latest` names it, unless the run was killed before it
    could update that file.

    Checkpoints of earlier versions are not numbered. Of these it is the one that `latest` names, or one of a higher
    step that was written later; if `latest` names no complete checkpoint, the most recently written one.

    Raises:
        CheckpointError: The root is a file, or cannot be read.
    """
    candidates = checkpoints(root)
    pointed = _named(root)
    named = next((checkpoint for checkpoint in candidates if checkpoint.name == pointed), None)
    if named is not None:
        header = header_of(named.path)
        if header is None:  # damaged, so nothing tells which ones are newer
            candidates = [checkpoint for checkpoint in candidates if checkpoint.step >= named.step]
        elif not header.commit:
            candidates = [
                checkpoint for checkpoint in candidates if checkpoint.step >= named.step or _commit_of(checkpoint)
            ]
    return max(candidates, key=_order_of).path if candidates else None


def newer_than_latest(root: Path) -> str | None:
    """A checkpoint that was saved after the one that `latest` returns and has been renamed or deleted, or an older one
    that the file `latest` names, and what to do; None if there is none.

    Raises:
        CheckpointError: The root is a file, or cannot be read.
    """
    known = checkpoints(root)
    newest = max(map(_order_of, known), default=(0, "", -1))
    for entry in entries(root):
        if STEP.fullmatch(entry) or LEFT_OVER.fullmatch(entry) or header_of(root / entry) is None:
            continue
        other = FoundCheckpoint(root / entry, manifests.read(root / entry).step, entry)
        if _order_of(other) > newest:
            right = name_of(other.step)
            return f"{other.path} is a checkpoint under another name than {right}, which is not found; rename it"
    pointed = _named(root)
    names = {checkpoint.path: checkpoint.name for checkpoint in known}
    last = latest(root)
    if pointed is None or (last is not None and names[last] == pointed):
        return None
    if last is not None and pointed in names.values():
        return (
            f"{root / LATEST} names {pointed}, and {names[last]} was saved after it; to go back, load "
            f"{root / pointed} by its path, or delete the later ones"
        )
    return f"{root / LATEST} names {pointed}, which is not there; put it back, or remove that file to go on without it"


def best(root: Path, direction: str) -> Path | None:
    """The checkpoint with the best metric, of the run of the newest one; None if that has none with a metric.

    Args:
        root: Where the checkpoints are.
        direction: `min` or `max`: which metric is the best.

    Raises:
        CheckpointError: The root is a file, or cannot be read.
    """
    newest = latest(root)
    run = header_of(newest) if newest else None
    of_run = [
        checkpoint
        for checkpoint in checkpoints(root)
        if run and (header := header_of(checkpoint.path)) and header.run == run.run
    ]
    return next((checkpoint.path for checkpoint in ranked(of_run, direction)), None)


def ranked(candidates: Iterable[FoundCheckpoint], direction: str) -> list[FoundCheckpoint]:
    """Those that have a metric, the best first; of equal ones the newest first.

    A metric that is not a number is none.
    """
    sign = -1 if direction == "max" else 1
    metrics = {checkpoint: header.metric for checkpoint in candidates if (header := header_of(checkpoint.path))}
    known = {
        checkpoint: sign * metric
        for checkpoint, metric in metrics.items()
        if metric is not None and not math.isnan(metric)
    }
    return sorted(sorted(known, key=_order_of, reverse=True), key=lambda checkpoint: known[checkpoint])


def next_commit(root: Path) -> int:
    """The number of the next commit.

    Raises:
        CheckpointError: The root is a file, or cannot be read.
    """
    return 1 + max(map(_commit_of, checkpoints(root)), default=0)


def _commit_of(checkpoint: FoundCheckpoint) -> int:
    header = header_of(checkpoint.path)
    return header.commit if header else 0


def _order_of(checkpoint: FoundCheckpoint) -> tuple[int, str, int]:
    return age_of(checkpoint) or (0, "", checkpoint.step)


def locate(where: Path, which: str | int = LATEST) -> Path:
    """The checkpoint that a user asks for.

    Args:
        where: A root, or one checkpoint.
        which: Of a root: "latest", a step, or the name of a directory.

    Raises:
        CheckpointError: There is no such checkpoint; the message lists the available ones.
    """
    if is_checkpoint(where) and which == LATEST:
        return where
    if not where.is_dir():
        hint = _WEIGHTS if where.suffix in _WEIGHT_FILES else "give a checkpoint, or the folder that holds checkpoints"
        raise CheckpointError(f"{where}: no such folder; {hint}")
    available = checkpoints(where)
    step = re.fullmatch(r"(?:step-)?(\d+)", str(which))
    if which == LATEST:
        path = latest(where)
    else:
        meant = [
            checkpoint
            for checkpoint in available
            if checkpoint.name == which or (step and checkpoint.step == int(step[1]))
        ]
        path = max(meant, key=_order_of).path if meant else None  # of several runs the newest
    if path is None:
        there = ", ".join(str(checkpoint.step) for checkpoint in available)
        at = f" at step {step[1].lstrip('0') or 0}" if step else "" if which == LATEST else f" named {which!r}"
        raise CheckpointError(
            f"{where}: no complete checkpoint{at}; {f'available: {there}' if there else _hint(where)}"
        )
    return path


def _hint(where: Path) -> str:
    """What a folder without checkpoints holds instead, and what to do."""
    if hint := next((hint for pattern, hint in _HELD.items() if any(where.glob(pattern))), None):
        return hint
    if (where / ".metadata").is_file():
        return (
            "this is a torch.distributed.checkpoint directory without a manifest; convert it with `unishard "
            "checkpoint convert`"
        )
    if left := incomplete(where):
        return f"a killed run left only incomplete files ({', '.join(left)}); give another folder"
    return "give the folder of `checkpoint.dir`, or one checkpoint in it"


def set_aside(root: Path) -> list[FoundCheckpoint]:
    """The complete checkpoints that were being replaced by new ones of the same step."""
    matches = [match for match in map(LEFT_OVER.fullmatch, entries(root)) if match and match["kind"] == "old"]
    return [
        FoundCheckpoint(root / match[0], int(match["step"]), match["name"])
        for match in matches
        if is_checkpoint(root / match[0])
    ]


def entries(root: Path) -> list[str]:
    """Names of all entries in a root.

    Raises:
        CheckpointError: The root is a file, or cannot be read.
    """
    try:
        return sorted(os.listdir(root))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{root}: cannot be read ({error.strerror}); give the folder that holds checkpoints"
        ) from error


def _named(root: Path) -> str | None:
    """The name in the file `latest`, whether or not its checkpoint exists."""
    try:
        match = STEP.fullmatch(read_bytes(root / LATEST, _LONGEST).decode("utf-8", "replace").strip())
    except OSError:
        return None
    return match[0] if match else None


def age_of(checkpoint: FoundCheckpoint) -> tuple[int, str, int] | None:
    """Sort key: the order of commits, and of unnumbered ones the time of writing; None if the manifest cannot be
    read.
    """
    header = header_of(checkpoint.path)
    return None if header is None else (header.commit, header.written, checkpoint.step)
