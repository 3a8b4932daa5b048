"""Which rank holds what under torch's data parallelism: rows of dimension 0. Pure: imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.contract.model_shape import ModelShape
from unishard.distributed.layout import Layout, rows


def layout_of(shape: ModelShape, ranks: int) -> Mapping[str, Layout]:
    """The rows of each parameter.

    Args:
        shape: The model.
        ranks: Ranks that share one copy; 1 where nothing is sharded.
    """
    return {each.name: rows(each.shape, each.ranks(ranks))._replace(slices=each.slices) for each in shape.parameters}
