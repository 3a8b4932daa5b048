"""Refuses a manifest with values that no run saves: a file may be edited, and its checksum removed."""

from __future__ import annotations

from collections.abc import Iterator

from unishard.checkpoint.manifest import FILE
from unishard.errors import CheckpointError


def require(wrong: Iterator[str]) -> None:
    """Check, before a run is changed, that nothing is wrong.

    Args:
        wrong: What the manifest says that cannot be, with the names of fields.

    Raises:
        CheckpointError: There is something.
    """
    first = next(wrong, None)
    if first is not None:
        raise CheckpointError(
            f"{FILE}: {first}, which no run saves; the file is damaged or was edited, use another checkpoint"
        )
