"""Converts a checkpoint of one tool into one of another, in one process: no engine, no model, one chunk in memory at a
time.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from unishard.checkpoint.archives import read_through
from unishard.checkpoint.disk import fsync
from unishard.checkpoint.files import open_file
from unishard.checkpoint.own_format import OWN
from unishard.contract import registry
from unishard.contract.checkpoint_format import Advance, CheckpointFormat
from unishard.errors import CheckpointError


def convert(
    source: Path,
    destination: Path,
    *,
    from_: str | None = None,
    to: str = "unishard",
    progress: Callable[[int], Advance] = lambda total: lambda written: None,
) -> tuple[str, ...]:
    """Convert a checkpoint to another format. A failure leaves nothing behind.

    Verifies what it reads: a checkpoint of unishard by its hashes, one of another tool by the checksums in files of
    torch.save.

    Args:
        source: A checkpoint directory in any known format.
        destination: A folder that does not exist yet.
        from_: The format of `source`; None to detect it.
        to: The format of `destination`.
        progress: Called with the total number of bytes; returns a function that is called after each chunk.

    Returns:
        Notes on what was not converted, and why.

    Raises:
        CheckpointError: `source` is not a checkpoint, is damaged or is not supported, `destination` exists, or a format
            is unknown.
    """
    known = formats()
    writer = _named(known, to)
    if writer.write is None:
        writable = " or ".join(name for name, format_ in known.items() if format_.write is not None)
        raise CheckpointError(f"checkpoints of {writer.title} can be read, but not written; use --to {writable}")
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination}: already exists; choose a folder that does not exist")
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder; give the directory of a checkpoint")
    reader = _named(known, from_) if from_ is not None else _detected(known, source)
    if reader.read is None:
        raise CheckpointError(
            f"{source}: checkpoints of {reader.title} can be written, but not read; convert the checkpoint that it was "
            "made from"
        )
    contents = reader.read(source)
    sizes = {path: path.stat().st_size for path in contents.archives}
    advance = progress(contents.bytes + sum(sizes.values()))
    with _created_atomically(destination) as folder:
        for path, size in sizes.items():
            _verify(path, size, advance)
        return (*contents.notes, *writer.write(contents, folder, advance))


def _verify(path: Path, size: int, advance: Advance) -> None:
    """Check a file of torch.save by its own checksums."""
    read = 0
    with open_file(path) as file:
        for count in read_through(file, str(path)):
            read += count
            advance(count)
    advance(size - read)


def formats() -> dict[str, CheckpointFormat]:
    """All known formats by name: unishard's own, then those of the installed backends.

    Raises:
        CheckpointError: Two backends define different formats with the same name.
    """
    formats_by_name = {OWN.name: OWN}
    for backend in registry.available():
        for name, format_ in registry.get(backend).checkpoint_formats.items():
            if formats_by_name.setdefault(name, format_) is not format_:
                raise CheckpointError(
                    f"two backends define the checkpoint format {name!r}, one of them is {backend}; uninstall one of "
                    "the two"
                )
    return formats_by_name


def _named(known: dict[str, CheckpointFormat], name: str) -> CheckpointFormat:
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise CheckpointError(f"unknown checkpoint format {name!r}; {hint}")
    return known[name]


def _detected(known: dict[str, CheckpointFormat], source: Path) -> CheckpointFormat:
    for format_ in known.values():
        if format_.recognises(source):
            return format_
    raise CheckpointError(
        f"{source}: not a checkpoint in a known format; known: {', '.join(format_.title for format_ in known.values())}"
    )


@contextmanager
def _created_atomically(destination: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to the destination on success, and deleted on an error."""
    folder = destination.parent / f".tmp-{destination.name}-{uuid.uuid4().hex[:8]}"
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
        fsync(folder)
        folder.rename(destination)
        fsync(destination.parent)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(
            f"{destination}: cannot be written ({error.strerror}); free disk space, or choose another folder"
        ) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
