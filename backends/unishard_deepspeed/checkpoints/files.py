"""Opens DeepSpeed's files safely and without deepspeed: its classes are replaced by inert ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unishard.checkpoint.files import open_file
from unishard.checkpoint.inside_folder import OutsideFolderError, file_inside
from unishard.errors import CheckpointError


class Address:
    """The range of a parameter in a rank's flat buffer."""

    start: int
    numel: int


class LossScaler:
    """State of a loss scaler; only its attributes are kept."""


class _Stage(int):
    """A ZeRO stage."""


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""Names of the stages, by number (DeepSpeed 0.19.8, runtime/zero/config.py, ZeroStageEnum)."""


def _member(kind: Any, name: Any) -> _Stage:
    """The only permitted use of `getattr`: Python 3.11.0 to 3.11.3 pickles enum members that way (enum.py,
    __reduce_ex__).
    """
    if kind is not _Stage or name not in _STAGES:
        raise ValueError("GLOBAL getattr")  # worded like torch's own refusal
    return _Stage(_STAGES.index(name))


_STANDINS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (Address, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_member, "builtins.getattr"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (LossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]
"""Replacements for DeepSpeed's classes (DeepSpeed 0.19.8, state_dict of its optimizers). No other classes are
admitted."""


def load(path: Path) -> dict[str, Any]:
    """Load a file. Tensors are memory-mapped.

    Raises:
        CheckpointError: It cannot be read, or contains anything but tensors, plain values and the admitted classes of
            DeepSpeed.
    """
    try:
        open_file(file_inside(path.parent, path.name)).close()  # torch would wait for a pipe
        with torch.serialization.safe_globals(_STANDINS):
            contents = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OutsideFolderError as error:
        raise CheckpointError(f"{path}: {error}; do not trust this checkpoint, or put the file into it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; the checkpoint is incomplete") from error
    except Exception as error:  # a damaged or malicious file can raise anything
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise CheckpointError(
                f"{path}: cannot be read ({type(error).__name__}); it is damaged, or in the legacy format of torch.save"
            ) from error
        raise CheckpointError(
            f"{path}: refers to {named[1].rstrip('.,')}, which is not loaded for safety; save without it (client_state)"
        ) from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path}: not a DeepSpeed checkpoint file; it is damaged")
    return contents
