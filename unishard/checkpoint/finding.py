"""Finds checkpoints under a root, also after a killed run. Changes nothing. The names are explained in `directory`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from unishard.checkpoint import manifest as manifests
from unishard.errors import CheckpointError

__all__ = [
    "LATEST",
    "LEFT_OVER",
    "STEP",
    "FoundCheckpoint",
    "age_of",
    "checkpoints",
    "entries",
    "incomplete",
    "is_checkpoint",
    "latest",
    "locate",
    "name_of",
    "set_aside",
]

LATEST = "latest"
"""The file that names the last committed checkpoint."""
LEFT_OVER = re.compile(r"\.(?P<kind>tmp|old|trash)-step-(?P<step>\d{8,})-[0-9a-f]{32}|\.latest-[0-9a-f]{32}")
"""Names of temporary directories and files: being written, replaced or deleted."""
STEP = re.compile(r"step-(\d{8,})")
"""The name of a checkpoint."""


class FoundCheckpoint(NamedTuple):
    """A complete checkpoint."""

    path: Path
    """Its directory."""
    step: int


def name_of(step: int) -> str:
    """The name of the directory of a step's checkpoint."""
    return f"step-{step:08d}"


def is_checkpoint(folder: Path) -> bool:
    """Whether a directory is a complete checkpoint."""
    return (folder / manifests.FILE).is_file()


def checkpoints(root: Path) -> list[FoundCheckpoint]:
    """The complete checkpoints, by ascending step; empty if the root does not exist.

    Raises:
        CheckpointError: The root is a file, or cannot be read.
    """
    named = {int(match[1]): root / entry for entry in entries(root) if (match := STEP.fullmatch(entry))}
    found = {old.step: old.path for old in set_aside(root)}
    found |= {step: path for step, path in named.items() if is_checkpoint(path)}
    return [FoundCheckpoint(found[step], step) for step in sorted(found)]


def incomplete(root: Path) -> list[str]:
    """Names of incomplete directories and files: left by a killed run, or being written by a running one.

    Raises:
        CheckpointError: The root is a file, or cannot be read.
    """
    complete = {found.path.name for found in checkpoints(root)}
    return [name for name in entries(root) if name not in complete and (LEFT_OVER.fullmatch(name) or STEP.fullmatch(name))]


def latest(root: Path) -> Path | None:
    """The checkpoint to resume from; None if there is none.

    This is the one named in `latest`, which need not be the highest step: a run may have resumed from an earlier one. A checkpoint of
    a higher step that was written later takes precedence, because the run was killed before it could update `latest`. If `latest`
    names no complete checkpoint, this is the most recently written one.

    Raises:
        CheckpointError: The root is a file, or cannot be read.
    """
    found = checkpoints(root)
    named = next((each for each in found if each.step == _named(root)), None)
    candidates = [each for each in found if named is None or each.step >= named.step]
    if len(candidates) > 1:
        candidates.sort(key=lambda each: age_of(each) or ("", each.step))
    return candidates[-1].path if candidates else None


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
        raise CheckpointError(f"{where}: no such folder; give a checkpoint, or the folder that holds checkpoints")
    found = checkpoints(where)
    step = re.fullmatch(r"(?:step-)?(\d+)", str(which))
    path = latest(where) if which == LATEST else next((each.path for each in found if step and each.step == int(step[1])), None)
    if path is None:
        there = ", ".join(str(each.step) for each in found)
        at = f" at step {step[1].lstrip('0') or 0}" if step else "" if which == LATEST else f" named {which!r}"
        raise CheckpointError(f"{where}: no complete checkpoint{at}; {f'available: {there}' if there else _hint(where)}")
    return path


def _hint(where: Path) -> str:
    """What a folder without checkpoints holds instead, and what to do."""
    if (where / ".metadata").is_file():
        return "this is a torch.distributed.checkpoint directory without a manifest; convert it with `unishard checkpoint convert`"
    if left := incomplete(where):
        return f"a killed run left only incomplete files ({', '.join(left)}); give another folder"
    return "give the folder of `checkpoint.dir`, or one checkpoint in it"


def set_aside(root: Path) -> list[FoundCheckpoint]:
    """The complete checkpoints that were being replaced by new ones of the same step."""
    matches = [match for match in map(LEFT_OVER.fullmatch, entries(root)) if match and match["kind"] == "old"]
    return [FoundCheckpoint(root / match[0], int(match["step"])) for match in matches if is_checkpoint(root / match[0])]


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
        raise CheckpointError(f"{root}: cannot be read ({error.strerror}); give the folder that holds checkpoints") from error


def _named(root: Path) -> int | None:
    """The step named in the file `latest`, whether or not its checkpoint exists."""
    try:
        match = STEP.fullmatch((root / LATEST).read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return None
    return int(match[1]) if match else None


def age_of(found: FoundCheckpoint) -> tuple[str, int] | None:
    """Sort key: when the checkpoint was written; None if its manifest cannot be read."""
    try:
        return manifests.read(found.path).written, found.step
    except CheckpointError:
        return None
