"""Files that are useful beside the weights. If they cannot be made, the run and its weights are kept all the same."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch.distributed as dist

_logger = logging.getLogger("unishard")


def optional(subject: str, make: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
    """Make files that a checkpoint or an export can do without. Warns and returns none if they cannot be made."""
    try:
        return make()
    except Exception as error:  # of any library or user
        warn_once(f"{subject} is missing in checkpoints and exports: {type(error).__name__}: {error}")
        return {}


@cache
def warn_once(message: str) -> None:
    """Warn on rank 0, once for all checkpoints and exports of a run."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _logger.warning(message)


def written_by(save: Callable[[str], object]) -> dict[str, bytes]:
    """The files that a function writes into the folder that it is given."""
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        files = (path for path in sorted(Path(folder).rglob("*")) if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}
