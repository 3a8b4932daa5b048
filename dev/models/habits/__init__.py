"""Habits of own modules."""

from __future__ import annotations

from dev.models.habits import (
    autograd,
    control_flow,
    layers,
    losses,
    parameters,
    random,
    recomputed,
    reparametrized,
    sharing,
)

__all__ = ["HABITS"]

HABITS = (
    layers.KIND,
    parameters.KIND,
    reparametrized.KIND,
    recomputed.KIND,
    sharing.KIND,
    control_flow.KIND,
    autograd.KIND,
    losses.KIND,
    random.KIND,
)
