"""The observers that a config asks for."""

from __future__ import annotations

import torch.distributed as dist

from unishard.contract.adapter import Updates
from unishard.contract.plan import ObserveSpec
from unishard.observe.expected_memory import ExpectedMemory
from unishard.observe.modules import ModuleRecorder
from unishard.observe.observer import Observer, Observers
from unishard.observe.position import Position
from unishard.observe.profiling import Profiling
from unishard.observe.recorder import MetricsRecorder
from unishard.observe.unlogged import Unlogged


def observers_of(spec: ObserveSpec, updates: Updates, order: Position, memory: ExpectedMemory) -> Observers:
    """Start what `logging` and `profile` ask for on this rank, beside the note of an out-of-memory error. Collective.

    Raises:
        ConfigError: On every rank: a destination cannot be opened.
    """
    watching: list[Observer] = [memory]
    if spec.profile.steps and (spec.profile.ranks == "all" or dist.get_rank() == 0):
        watching.append(Profiling(spec.profile, order, updates.model.device))
    if spec.logging.to and spec.logging.module_steps:
        watching.append(ModuleRecorder(spec.logging, updates, order))
    if spec.logging.to:
        watching.append(MetricsRecorder(spec, updates.model, order, memory.sent_bytes))
    elif "to" not in spec.logging.model_fields_set and dist.get_rank() == 0:
        watching.append(Unlogged())
    return Observers(*watching)
