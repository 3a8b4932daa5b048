"""Rows for what the training script around Accelerate does itself, where it is more than the fallbacks say.

The same for every engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unishard.config import Config
from unishard.config.launch import PORT
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.fallbacks import FALLBACKS, noted
from unishard.contract.field_rows import exact, left_to_script, row, saved_by_script, when_default
from unishard.contract.rules import NO_KEY, Fit, Rule, approximate, is_, needs_input, unless
from unishard.formats.accelerate.deepspeed import LAUNCHER
from unishard.formats.accelerate.entries import block_of
from unishard.formats.launch.processes import Launch

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


_DEVICES = "CUDA_VISIBLE_DEVICES"


def _processes(cfg: Config, topology: Topology) -> Native:
    per_node = cfg.launch.processes_per_node
    return (
        {}
        if per_node is None
        else {"num_processes": per_node * cfg.launch.max_nodes, "num_machines": cfg.launch.max_nodes}
    )


def _endpoint(cfg: Config, topology: Topology) -> Native:
    if cfg.launch.endpoint is None:
        return {}
    host, _, port = cfg.launch.endpoint.rpartition(":")
    named = port.isdecimal() and host
    return {
        "main_process_ip": host if named else cfg.launch.endpoint,
        "main_process_port": int(port) if named else PORT,
    }


def _rendezvous(cfg: Config, topology: Topology) -> Native:
    return {"rdzv_backend": cfg.launch.rendezvous} if cfg.launch.max_nodes > 1 else {}


def _devices(cfg: Config, topology: Topology) -> Native:
    value = cfg.launch.environment.get(_DEVICES)
    return {} if value is None else {"gpu_ids": str(value)}


def _elastic(cfg: Config) -> bool:
    return cfg.launch.min_nodes != cfg.launch.max_nodes


def _argument(name: str, note: str) -> Rule:
    """A row for what only the command line of `accelerate launch` has."""
    return row(Fit.IGNORED, NO_KEY, note, when_default(f"launch.{name}"))


LAUNCH_RULES: Mapping[str, Rule] = {
    "launch.nodes": exact(
        "num_machines",
        approximate("a range", _elastic, "a fixed number: the run does not go on with fewer"),
        to=lambda cfg, topology: {"num_machines": cfg.launch.max_nodes} if cfg.launch.max_nodes > 1 else {},
    ),
    "launch.processes_per_node": exact("num_processes", to=_processes),
    "launch.endpoint": exact("main_process_ip, main_process_port", to=_endpoint),
    "launch.rendezvous": exact("rdzv_backend", to=_rendezvous),
    "launch.rendezvous_id": _argument(
        "rendezvous_id", "Accelerate has no such argument: torchrun's own name, none, holds"
    ),
    "launch.rendezvous_options": _argument("rendezvous_options", "pass accelerate launch --rdzv_conf"),
    "launch.max_restarts": _argument("max_restarts", "pass accelerate launch --max_restarts"),
    "launch.environment": exact(
        "gpu_ids",
        needs_input(
            "other variables",
            lambda cfg: bool(cfg.launch.environment.keys() - {_DEVICES}),
            f"export them before the launch; only {_DEVICES} has a key",
        ),
        to=_devices,
    ),
}
"""Rows by field, the same for every engine."""


_SCHEDULE = "steps once for each rank: pass step_scheduler_with_optimizer=False"

BY_SCRIPT: Mapping[str, Rule] = {
    "training.last_window": row(
        Fit.APPROXIMATE,
        NO_KEY,
        "Accelerate divides the last update by the full window: the last samples weigh less",
        unless("no accumulation", lambda cfg: cfg.training.gradient_accumulation_steps == 1, "every window is full"),
        needs_input(*is_("training.last_window", "drop"), "leave out the batches that do not fill a window"),
    ),
    "training.seed": left_to_script(
        "call accelerate.utils.set_seed(..., device_specific=True), and seed the DataLoader"
    ),
    **noted({path: _SCHEDULE for path in FALLBACKS if path.startswith("scheduler.")}),
    **noted(
        {
            "training.micro_batch_size": "batch_size of the DataLoader passed to Accelerator.prepare, for each rank",
            "optimizer.name": "build the optimizer and pass it to Accelerator.prepare",
        }
    ),
    **{path: FALLBACKS[path]._replace(when=(when_default(path),)) for path in ("communication.overlap", "strict")},
    **saved_by_script("accelerator.save_state(...)"),
    **LAUNCH_RULES,
}
"""Rows by field."""
