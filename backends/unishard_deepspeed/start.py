"""Import and set up DeepSpeed in a process whose group unishard started: quietly, without compilation, on this rank's
device.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unishard.config.topology import Topology
from unishard.distributed.devices import device_of
from unishard.errors import BackendError
from unishard_deepspeed.oldest import require_version
from unishard_deepspeed.private.building import compile_nothing, leave_process_group

_EXPECTED = (
    # For every torch optimizer except Adam, AdamW and Adagrad; unishard's suite tests them.
    "untested optimizer",
    # For a model without units (DeepSpeed 0.19.8, utils/z3_leaf_module.py); `verify` compares the units with the
    # config.
    "ZeRO leaf module configuration did not match any modules",
)
"""Substrings of warnings to suppress."""

_world: Any = None
"""The process group that DeepSpeed's references belong to."""


def load(topology: Topology) -> ModuleType:
    """Import DeepSpeed and set it up for this process. Can be called again, also after the process group was restarted.

    Raises:
        BackendError: It is too old, would compute on another type of device than the model, or cannot release a process
            group.
    """
    global _world
    require_version()
    device = device_of(topology)
    _set_device(device, topology)
    with quiet():
        import deepspeed
        from deepspeed.accelerator import get_accelerator
    if get_accelerator().device_name() != device.type:
        raise BackendError(
            f"DeepSpeed was imported for {get_accelerator().device_name()} before unishard.prepare, which computes on "
            f"{device.type}; unset DS_ACCELERATOR, or let unishard import DeepSpeed"
        )
    # torch 2.13 renames two collectives; DeepSpeed 0.19.8, comm/torch.py, still calls them by their old names.
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning
    )
    _quieten(logging.getLogger("DeepSpeed"))
    if device.type == "cpu":
        compile_nothing()
    if _world is not None and _world is not dist.group.WORLD:
        leave_process_group()
    _world = dist.group.WORLD
    return deepspeed  # type: ignore[no-any-return]


def _set_device(device: torch.device, topology: Topology) -> None:
    """Set this rank's device in the environment variables that DeepSpeed reads.

    Raises:
        BackendError: The user has set another type of device.
    """
    asked = (
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if device.type == "cpu"
        else os.environ.get("DS_ACCELERATOR", "cuda")
    )
    if asked != device.type:
        raise BackendError(
            f"DS_ACCELERATOR={asked} is set, but this rank computes on {device.type}; unset DS_ACCELERATOR"
            + (", or hide the devices with CUDA_VISIBLE_DEVICES= to train on the CPU" if asked == "cpu" else "")
        )
    # DeepSpeed uses the launcher's local rank as the device index, also during training, and asserts that MPI's is the
    # same (DeepSpeed 0.19.8, runtime/engine.py, zero/partition_parameters.py and zero/utils.py).
    if device.type == "cpu":
        os.environ.setdefault("LOCAL_RANK", str(topology.local_rank))
        # Without it, stage 3 runs `numactl` in a process of its own in each reduction to count devices (DeepSpeed
        # 0.19.8, accelerator/cpu_accelerator.py).
        os.environ.setdefault("LOCAL_SIZE", str(topology.local_world_size))
        return
    for name in ("LOCAL_RANK", *(name for name in ("OMPI_COMM_WORLD_LOCAL_RANK",) if name in os.environ)):
        os.environ[name] = str(device.index)


class _SendsNumbers(TorchFunctionMode):
    """Lets DeepSpeed send parameters without dimensions: it views each as bytes, which torch 2.13 refuses for a tensor
    without dimensions.

    (DeepSpeed 0.19.8, runtime/engine.py, _broadcast_model; runtime/zero/partition_parameters.py, _zero_init_param.)
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.view and args[1:] == (torch.uint8,) and not args[0].dim():
            args = (args[0].view(1), torch.uint8)
        return function(*args, **kwargs or {})


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress what DeepSpeed prints while it builds an engine, and deprecation warnings of modules that it imports."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), _SendsNumbers():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _quieten(logger: logging.Logger) -> None:
    """Log only warnings and errors, to stderr; DeepSpeed logs to stdout."""
    logger.setLevel(logging.WARNING)
    own = [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]
    for handler in own:
        logger.removeHandler(handler)
    if own and logging.lastResort is not None:
        logger.addHandler(logging.lastResort)
    if _is_unexpected not in logger.filters:
        logger.addFilter(_is_unexpected)


def _is_unexpected(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(expected in message for expected in _EXPECTED)
