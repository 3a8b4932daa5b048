"""The shape of a model, by which a backend says what it holds."""

from __future__ import annotations

from torch import nn

from unishard.config import Sharding
from unishard.contract.kit.replicated import find_replicated
from unishard.contract.model_shape import ModelShape, ParameterShape, TensorShape
from unishard.distributed.dtypes import declared_by, name_of
from unishard.distributed.slices import slice_of
from unishard.engine.model.matrices import find_matrices
from unishard.engine.model.units import find_units


def shape_of(model: nn.Module, sharding: Sharding) -> ModelShape:
    """Describe a model before it is sharded; its units are those of any strategy that has some.

    Args:
        model: On any device, also the meta device.
        sharding: The section `sharding`, for the units.

    Raises:
        ConfigError: A pattern in `replicate` matches no parameter, or all of them.
        ModelError: A class that the section names is not in the model.
    """
    units = find_units(
        model,
        Sharding(
            units=sharding.units,
            min_unit_params=sharding.min_unit_params,
            conditional_modules=sharding.conditional_modules,
            replicate=sharding.replicate,
        ),
    )
    matrices = find_matrices(model, units)
    declared = {compute: declared_by(model, compute) for compute in ("bf16", "fp16")}
    replicated = set(find_replicated(model, sharding))
    unit_of = {id(parameter): index for index, unit in enumerate(units) for parameter in unit.module.parameters()}
    return ModelShape(
        parameters=tuple(
            ParameterShape(
                name,
                tuple(each.shape),
                name_of(each.dtype),
                each.requires_grad,
                unit_of.get(id(each), -1),
                tuple(dtype for dtype, names in declared.items() if name in names),
                id(each) in matrices,
                name in replicated,
                1 if (part := slice_of(each)) is None else part.of,
            )
            for name, each in model.named_parameters()
        ),
        buffers=tuple(
            TensorShape(name, tuple(each.shape), name_of(each.dtype)) for name, each in model.named_buffers()
        ),
        units=tuple(unit.name for unit in units),
        embeddings=frozenset(index for index, unit in enumerate(units) if unit.is_embedding),
    )
