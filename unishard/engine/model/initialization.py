"""Build models without a full copy on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from unishard.config import Config, expect_config
from unishard.config.topology import Topology
from unishard.contract.kit.materialization import replace_data
from unishard.failures import lifetime


@contextmanager
def init(cfg: Config) -> Iterator[None]:
    """Build models whose data exists only on rank 0 until `prepare` distributes it. Collective.

    On rank 0 nothing changes: the model is initialized on the CPU as usual, with the same random numbers. On the other
    ranks parameters go to the meta device when a module registers them; buffers keep their data. `prepare` then
    broadcasts and shards unit by unit. Under full_shard only rank 0 ever holds the whole model, and it frees what it
    has sent: all ranks together hold one copy, plus one unit (on DeepSpeed one parameter) per rank.

    Any number of models may be built inside, and prepared in any order.

    Args:
        cfg: The config that `prepare` will get.

    Raises:
        ConfigError: `cfg` is not a config.
    """
    expect_config(cfg)
    if lifetime.ensure(Topology.from_environment(), cfg.communication).rank == 0:
        yield
        return
    with without_data():
        yield


@contextmanager
def without_data() -> Iterator[None]:
    """Put parameters of modules built inside on the meta device, but not buffers."""
    handle = register_module_parameter_registration_hook(_drop)
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "meta" in str(error):
            error.add_note(
                "Inside unishard.init only rank 0 has parameter data, but this model's constructor reads it; build the "
                "model outside, with a full copy on each rank"
            )
        raise
    finally:
        handle.remove()


def _drop(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    # In place, so that a parameter shared by two modules stays shared.
    if parameter is not None and not parameter.is_meta:
        replace_data(parameter, torch.empty_like(parameter, device="meta"))
