"""Which rank holds what of the master weights under ZeRO. Pure: imports neither torch nor deepspeed.

The sources, all DeepSpeed 0.19.8, below runtime/zero/:

- Stages 1 and 2 flatten each parameter group and pad it to 2 x ranks elements (stage_1_and_2.py,
  `nccl_start_alignment_factor`), with `parameter_alignment` also what is behind each parameter, to 16 bytes.
- Stage 3 pads each parameter to a multiple of the ranks (partition_parameters.py, `_aligned_size`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unishard.config import Config
from unishard.contract.model_shape import ITEMSIZE, ModelShape
from unishard.distributed.layout import Layout, flat, flat_group, whole
from unishard_deepspeed import fields

_ALIGNED = 16
"""Bytes."""


def layout_of(
    shape: ModelShape, cfg: Config, ranks: int, groups: Sequence[Sequence[str]], zero: Mapping[str, Any]
) -> Mapping[str, Layout]:
    """The interval of each master weight, and of each frozen parameter.

    Args:
        shape: The model.
        cfg: What to run.
        ranks: Ranks that share one copy; 1 at stage 0.
        groups: Names of the trainable parameters in each group of the optimizer, which has one dtype.
        zero: The block `zero_optimization`.
    """
    if fields.stage(cfg) not in (1, 2):
        return {
            each.name: flat(each.numel, max(1, ranks // each.slices))._replace(slices=each.slices)
            for each in shape.parameters
        }
    named = {each.name: each for each in shape.parameters}
    layout = {name: whole(each.numel)._replace(slices=each.slices) for name, each in named.items()}
    for names in filter(None, groups):
        size = ITEMSIZE["fp32" if named[names[0]].kept(cfg.precision) else cfg.precision.compute]
        align = _ALIGNED // size if zero.get("parameter_alignment") else 1
        numels = {name: named[name].numel for name in names}
        slices = named[names[0]].slices  # a group has slices of the same holders, or none
        parts = flat_group(numels, ranks // slices, multiple=2 * ranks // slices, align=align)
        layout |= {name: part._replace(slices=slices) for name, part in parts.items()}
    return layout
