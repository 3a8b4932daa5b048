"""Brings DeepSpeed up in a process whose group unishard has started: quietly, without compiling anything, on the right device."""

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

from unishard.config import Config
from unishard.errors import BackendError
from unishard.topology import Topology

__all__ = ["hushed", "load", "require_files"]

_EXPECTED = (
    # About every torch optimizer but Adam, AdamW and Adagrad; unishard's suite is the test.
    "untested optimizer",
    # About a model without units (DeepSpeed 0.19.8, utils/z3_leaf_module.py); `verify` compares the units with what was asked.
    "ZeRO leaf module configuration did not match any modules",
)
"""In warnings that say nothing new."""

_world: Any = None
"""The process group that DeepSpeed's own references belong to."""


def load(topology: Topology) -> ModuleType:
    """DeepSpeed, imported and set up for this process. Safe to call again, also after the process group was restarted."""
    global _world
    # DeepSpeed insists on this variable of a launcher, also while it trains (DeepSpeed 0.19.8, runtime/engine.py and zero/utils.py).
    os.environ.setdefault("LOCAL_RANK", str(topology.local_rank))
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with hushed():
        import deepspeed
        from deepspeed.comm import comm
        from deepspeed.utils import groups
    # torch 2.13 renames two collectives; DeepSpeed 0.19.8, comm/torch.py, still calls them by their old names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning)
    _quieten(logging.getLogger("DeepSpeed"))
    # Would be compiled for half a minute at first use, and only inference calls it (DeepSpeed 0.19.8, comm/torch.py, build_shm_op).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if _world is not None and _world is not dist.group.WORLD:
        # DeepSpeed keeps clones of a group that is gone (DeepSpeed 0.19.8, comm/comm.py and utils/groups.py).
        groups._release_process_group_references()
        comm.cdb = None
    _world = dist.group.WORLD
    return deepspeed  # type: ignore[no-any-return]


def require_files(cfg: Config) -> None:
    """Check that DeepSpeed can keep in files what a config asks for, before anything is changed.

    Raises:
        BackendError: Its op is not there and cannot be built, or it would round the parameters.
    """
    if cfg.offload.params != "nvme":
        return
    with hushed():
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.op_builder import AsyncIOBuilder

        there = AsyncIOBuilder().is_compatible(verbose=False)
    if cfg.precision.compute == "fp32" and not get_accelerator().is_fp16_supported():
        # It then takes bf16 for the format that it was told (DeepSpeed 0.19.8, runtime/zero/partition_parameters.py, _set_dtype).
        raise BackendError(
            "offload.params: nvme would round the fp32 parameters to bf16 on a device without fp16 (DeepSpeed 0.19.8); set it to cpu, or "
            "precision to bf16"
        )
    if not there:
        raise BackendError(
            "offload to nvme needs DeepSpeed's async_io op, which can be neither found nor built here; install libaio with its headers "
            "(libaio-dev, libaio-devel) and a C++ compiler, or set offload.params to cpu"
        )


@contextmanager
def hushed() -> Iterator[None]:
    """Drop what DeepSpeed prints while it builds an engine, and deprecations inside the modules that it imports so late."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _quieten(logger: logging.Logger) -> None:
    """Warnings and worse, on stderr; DeepSpeed logs to stdout."""
    logger.setLevel(logging.WARNING)
    own = [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]
    for handler in own:
        logger.removeHandler(handler)
    if own and logging.lastResort is not None:
        logger.addHandler(logging.lastResort)
    if _is_news not in logger.filters:
        logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(expected in message for expected in _EXPECTED)
