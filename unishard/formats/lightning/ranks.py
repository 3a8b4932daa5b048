"""The ranks that a file with Lightning's arguments asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.topology import Topology


def ranks_of(trainer: Mapping[str, Any]) -> Topology | None:
    """What `devices` and `num_nodes` say; None where they leave it open."""
    devices = _count(trainer.get("devices"))
    nodes = _count(trainer.get("num_nodes", 1))
    return Topology(world_size=devices * nodes, local_world_size=devices) if devices and nodes else None


def _count(value: Any) -> int | None:
    """Of devices: a number, or a list of their indices."""
    if isinstance(value, list | tuple):
        return len(value) or None
    text = str(value).strip()
    if "," in text:
        return len([item for item in text.split(",") if item.strip()])
    return int(text) if text.isdigit() and 0 < int(text) < 2**31 else None
