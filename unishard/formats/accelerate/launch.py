"""What a file of Accelerate says about its processes (accelerate 1.15.0, commands/launch.py and utils/launch.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config.topology import Topology
from unishard.formats.accelerate.deepspeed import LAUNCHER
from unishard.formats.accelerate.entries import block_of
from unishard.formats.launching import Launch

__all__ = ["launch_of"]

_FILTERS = {"deepspeed_inclusion_filter": "those in", "deepspeed_exclusion_filter": "without"}


def launch_of(document: Mapping[str, Any], topology: Topology | None) -> Launch:
    """The processes that a document asks for, of as many ranks as are known."""
    nodes, total = document.get("num_machines"), document.get("num_processes")
    processes = total if nodes in (None, 1) or total is None else f"$(({total} / {nodes}))"
    if topology is not None and total is not None:
        nodes, processes = topology.world_size // topology.local_world_size, topology.local_world_size
    backend = document.get("rdzv_backend")
    devices = document.get("gpu_ids")
    return Launch(
        nodes,
        processes,
        document.get("machine_rank") if nodes not in (None, 1) else None,
        document.get("main_process_ip"),
        document.get("main_process_port"),
        None if backend in (None, "static") else backend,
        None if devices in (None, "all") else devices,
        _hosts(block_of(document, "deepspeed_config")),
    )


def _hosts(block: Mapping[str, Any]) -> str | None:
    named = {name: block[name] for name in LAUNCHER if name in block and block[name] is not None}
    if "deepspeed_hostfile" not in named:
        return None
    filters = [f"{word} {named[name]}" for name, word in _FILTERS.items() if name in named]
    return ", ".join((str(named["deepspeed_hostfile"]), *filters))
