"""How a file of Accelerate says the section `launch` (accelerate 1.15.0, commands/launch.py)."""

from __future__ import annotations

from collections.abc import Mapping

from unishard.config import Config
from unishard.config.nested import Native
from unishard.config.topology import Topology
from unishard.contract.field_rows import exact, row, when_default
from unishard.contract.rules import NO_KEY, Fit, Rule, When
from unishard.formats.accelerate.keys import PORT

__all__ = ["LAUNCH_RULES"]

_DEVICES = "CUDA_VISIBLE_DEVICES"


def _nodes(cfg: Config, topology: Topology) -> Native:
    return {"num_machines": cfg.launch.max_nodes} if cfg.launch.max_nodes > 1 else {}


def _processes(cfg: Config, topology: Topology) -> Native:
    each = cfg.launch.processes_per_node
    return {} if each is None else {"num_processes": each * cfg.launch.max_nodes, "num_machines": cfg.launch.max_nodes}


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


def _other_variables(cfg: Config) -> bool:
    return bool(cfg.launch.environment.keys() - {_DEVICES})


def _elastic(cfg: Config) -> bool:
    return cfg.launch.min_nodes != cfg.launch.max_nodes


def _argument(name: str, note: str) -> Rule:
    """A row for what only the command line of `accelerate launch` has."""
    return row(Fit.IGNORED, NO_KEY, note, when_default(f"launch.{name}"))


LAUNCH_RULES: Mapping[str, Rule] = {
    "launch.nodes": exact(
        "num_machines",
        When("a range", _elastic, Fit.APPROXIMATE, "a fixed number: the run does not go on with fewer"),
        to=_nodes,
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
        When(
            "other variables",
            _other_variables,
            Fit.NEEDS_INPUT,
            f"export them before the launch; only {_DEVICES} has a key",
        ),
        to=_devices,
    ),
}
"""Rows by field, the same for every engine."""
