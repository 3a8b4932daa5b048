"""Opens DeepSpeed's files without trusting their pickles, and without deepspeed: classes of its own become inert values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unishard.errors import CheckpointError

__all__ = ["Address", "LossScaler", "load"]


class Address:
    """Where a parameter lies in the flat memory of a rank."""

    start: int
    numel: int


class LossScaler:
    """State of a loss scaler: what its attributes are is all that is kept."""


class _Stage(int):
    """A ZeRO stage."""


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""Names of the stages, by number (DeepSpeed 0.19.8, runtime/zero/config.py, ZeroStageEnum)."""


def _member(kind: Any, name: Any) -> _Stage:
    """What `getattr` may do in these files: Python 3.11.0 to 3.11.3 writes a member of an enum that way (enum.py, __reduce_ex__)."""
    if kind is not _Stage or name not in _STAGES:
        raise ValueError("GLOBAL getattr")  # said as torch says it of what it does not admit
    return _Stage(_STAGES.index(name))


_STANDINS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (Address, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_member, "builtins.getattr"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]
"""What is made in place of DeepSpeed's classes (DeepSpeed 0.19.8, state_dict of its optimizers). Nothing else is admitted."""


def load(path: Path) -> dict[str, Any]:
    """What a file holds. Tensors stay in the file until they are read.

    Raises:
        CheckpointError: It cannot be read, or names anything but tensors, plain values and DeepSpeed's own few classes.
    """
    try:
        with torch.serialization.safe_globals(_STANDINS):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; the checkpoint is incomplete") from error
    except Exception as error:  # a damaged or hostile file fails in any way
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}); it is damaged, or of an old torch.save") from error
        raise CheckpointError(
            f"{path}: names {named[1].rstrip('.,')}, which has no place among tensors and is not run; save without it (client_state)"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds no checkpoint of DeepSpeed; it is damaged")
    return found
