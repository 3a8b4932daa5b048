"""Bytes of a parameter between steps. Imports no torch."""

from __future__ import annotations

from unishard.config import Config
from unishard.contract.model_shape import ITEMSIZE, ParameterShape, itemsize


def own_size(parameter: ParameterShape, cfg: Config) -> int:
    """Bytes of an element of a parameter: trainable ones are master weights, frozen ones keep their dtype unless they
    are kept in fp32.
    """
    if parameter.kept(cfg.precision):
        return ITEMSIZE["fp32"]
    return ITEMSIZE[cfg.precision.master] if parameter.trainable else itemsize(parameter.dtype)
