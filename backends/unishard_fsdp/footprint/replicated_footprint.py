"""Bytes of parameters that every rank holds whole beside shards (`sharding.replicate`). Pure: imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.footprint import Bytes, Collective, Footprint, state_by_parameter
from unishard.contract.model_shape import ITEMSIZE, ModelShape, ParameterShape, itemsize
from unishard_fsdp.fields import DTYPES
from unishard_fsdp.footprint.parameter_size import own_size
from unishard_fsdp.footprint.rows import layout_of


def beside(
    sharded: Footprint, shape: ModelShape, cfg: Config, topology: Topology, native: Native, matrices: Collection[str]
) -> Footprint:
    """The footprint of what is sharded, with what is not.

    Args:
        sharded: Of the other parameters.
        shape: The model.
        cfg: What to run.
        topology: The ranks.
        native: The native config of `translate`.
        matrices: Names of the parameters that are updated as matrices.
    """
    if not shape.replicated:
        return sharded
    trained = [parameter for parameter in shape.replicated if parameter.trainable]
    numel = sum(parameter.numel for parameter in trained)
    state = state_by_parameter(cfg, trained, matrices, layout_of(shape, 1), topology.rank)
    master, on_host = ITEMSIZE[cfg.precision.master], native["host_optimizer"] is not None
    added = numel * ITEMSIZE[cfg.precision.accumulate]
    averaged = (numel + len(trained)) * itemsize(native["mp_policy"]["reduce_dtype"])
    earlier = added if cfg.training.gradient_accumulation_steps > 1 else 0
    traffic = Collective("all_reduce", "gradients", "backward", averaged, topology.world_size)
    return replace(
        sharded,
        parameters=sharded.parameters + Bytes(sum(_in_module(each, cfg) for each in shape.replicated)),
        masters=sharded.masters
        + Bytes(sum(_apart(each, cfg) for each in shape.replicated), numel * master if on_host else 0),
        optimizer=sharded.optimizer
        + (Bytes(host=state) if on_host or cfg.offload.optimizer == "nvme" else Bytes(state)),
        gradients=sharded.gradients + Bytes(numel * master),
        gathered=sharded.gathered + averaged,
        forward=sharded.forward.plus(earlier, earlier),
        backward=sharded.backward.plus(earlier, added),
        final=sharded.final + added + averaged,
        step=sharded.step + numel * master,
        traffic=(*sharded.traffic, *[traffic] * (topology.world_size > 1 and bool(trained))),
    )


def _is_cast(parameter: ParameterShape, cfg: Config) -> bool:
    """Whether it computes in another dtype than that of its weights."""
    compute = cfg.precision.compute
    if compute == "fp32" or not parameter.floating or parameter.kept(cfg.precision):
        return False
    return cfg.precision.master != compute if parameter.trainable else parameter.dtype != DTYPES[compute]


def _in_module(parameter: ParameterShape, cfg: Config) -> int:
    """Bytes of what the model computes with."""
    size = ITEMSIZE[cfg.precision.compute] if _is_cast(parameter, cfg) else own_size(parameter, cfg)
    return parameter.numel * size


def _apart(parameter: ParameterShape, cfg: Config) -> int:
    """Bytes of the weight that it was cast from."""
    return parameter.numel * own_size(parameter, cfg) if _is_cast(parameter, cfg) else 0
