"""How Lightning's Trainer says the section `launch` (2.6.6): devices and num_nodes; its launcher reads where hosts meet
from variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.field_rows import exact, row, when_default
from unishard.contract.rules import NO_KEY, Fit, Rule, When
from unishard.formats.lightning.trainer_rules import trainer

__all__ = ["LAUNCHING"]

_DEVICES = "CUDA_VISIBLE_DEVICES"
_INDEXES = re.compile(r"\d+(,\d+)*")


def _named(cfg: Config) -> list[int] | None:
    """The GPUs that each host has ranks on, where each rank has one."""
    text = str(cfg.launch.environment.get(_DEVICES, ""))
    found = [int(index) for index in text.split(",")] if _INDEXES.fullmatch(text) else []
    return found if found and len(found) == cfg.launch.processes_per_node else None


def _devices(cfg: Config, topology: Topology) -> Native:
    each = topology.local_world_size if topology.world_size > 1 else cfg.launch.processes_per_node
    named = _named(cfg)
    return {} if each is None else trainer(accelerator="gpu", devices=named if named and len(named) == each else each)


def _nodes(cfg: Config, topology: Topology) -> Native:
    """Those that were asked for count."""
    asked = topology.world_size // topology.local_world_size
    return (
        trainer(num_nodes=asked if topology.world_size > 1 else cfg.launch.max_nodes)
        if asked > 1 or cfg.launch.max_nodes > 1
        else {}
    )


def _argument(name: str, note: str) -> Rule:
    """A row for what is said around the script."""
    return row(Fit.IGNORED, NO_KEY, note, when_default(f"launch.{name}"))


def _others(cfg: Config) -> bool:
    return bool(cfg.launch.environment.keys() - {_DEVICES}) or (
        _DEVICES in cfg.launch.environment and _named(cfg) is None
    )


LAUNCHING: Mapping[str, Rule] = {
    "launch.nodes": exact(
        "num_nodes",
        When(
            "a range",
            lambda cfg: cfg.launch.min_nodes != cfg.launch.max_nodes,
            Fit.APPROXIMATE,
            "a fixed number: the run does not go on with fewer",
        ),
        to=_nodes,
    ),
    "launch.processes_per_node": exact("devices", to=_devices),
    "launch.endpoint": _argument(
        "endpoint", "set MASTER_ADDR and MASTER_PORT, which Lightning's launcher reads; torchrun sets them"
    ),
    "launch.max_restarts": _argument(
        "max_restarts", "Lightning's launcher has no restarts; start the script with torchrun --max-restarts"
    ),
    "launch.environment": exact(
        "devices",
        When(
            "other variables",
            _others,
            Fit.NEEDS_INPUT,
            f"export them before the launch; only {_DEVICES} has an argument",
        ),
    ),
}
"""Rows by field, the same for every strategy."""
