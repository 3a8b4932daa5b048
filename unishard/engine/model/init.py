"""Builds models without a full copy on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from unishard.config import Config, expect_config
from unishard.config.topology import Topology
from unishard.distributed import process_group
from unishard.engine.model.materialization import become

__all__ = ["init", "without_data"]


@contextmanager
def init(cfg: Config) -> Iterator[None]:
    """Models built inside have their data on rank 0 alone, until `prepare` sends it to every rank. Collective.

    On rank 0 nothing changes: the model is initialised as it would be without this, from the same random numbers, on the CPU. On
    the other ranks parameters are put on the meta device as soon as a module takes them; buffers have their data everywhere.
    `prepare` then sends and shards unit by unit. Under full_shard no rank but rank 0 ever holds the model, and rank 0 drops what
    it has sent: all ranks together hold it once, and beside it one unit (on DeepSpeed one parameter) each.

    Any number of models may be built inside, and prepared in any order.

    Args:
        cfg: What will run.

    Raises:
        ConfigError: `cfg` is no config.
    """
    expect_config(cfg)
    if process_group.ensure(Topology.from_environment()).rank == 0:
        yield
        return
    with without_data():
        yield


@contextmanager
def without_data() -> Iterator[None]:
    """Parameters of modules built inside are on the meta device; buffers are not."""
    handle = register_module_parameter_registration_hook(_drop)
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "meta" in str(error):
            error.add_note(
                "Inside unishard.init only rank 0 has the data of parameters, and this model's constructor reads it; build the model "
                "outside, whole on each rank"
            )
        raise
    finally:
        handle.remove()


def _drop(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    # In place, so that a parameter that is given to two modules stays one.
    if parameter is not None and not parameter.is_meta:
        become(parameter, torch.empty_like(parameter, device="meta"))
