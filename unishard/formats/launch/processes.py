"""How a config or a command wants its processes started, and the torchrun line that does it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unishard.config.launch import PORT
from unishard.config.topology import Topology
from unishard.contract.templates import placeholders_in
from unishard.formats.launch.line import LaunchLine


@dataclass(frozen=True, slots=True)
class Launch:
    """What a document says about its processes. None where it is silent; text where it holds a placeholder."""

    nodes: Any = None
    processes: Any = None
    """On each node."""
    node_rank: Any = None
    address: Any = None
    """Of the node with rank 0."""
    port: Any = None
    rendezvous: Any = None
    """Torchrun's rendezvous backend, where it is not `static`."""
    devices: Any = None
    """Indices of the GPUs, with commas between them."""
    hosts: Any = None
    """A hostfile, with the filter on it."""
    max_restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""

    def torchrun(self) -> str:
        """The line to type on each node; empty where the document says nothing about its processes."""
        if self == Launch(rendezvous=self.rendezvous, max_restarts=self.max_restarts, environment=self.environment):
            return ""
        several = self.nodes not in (None, 1, "1")
        words = [f"CUDA_VISIBLE_DEVICES={self.devices}"] if self.devices is not None else []
        words += ["torchrun", *([f"--nnodes {self.nodes}"] if several else [])]
        words.append(f"--nproc-per-node {'gpu' if self.processes is None else self.processes}")
        words += self._meeting(several=several)
        words += [f"--max-restarts {self.max_restarts}"] if self.max_restarts else []
        where = f"  # once on each host of {self.hosts}" if self.hosts else ""
        return " ".join((*words, "train.py")) + where

    def _meeting(self, *, several: bool) -> list[str]:
        """Where the processes of several nodes meet."""
        if self.rendezvous is not None and several:
            end = f" --rdzv-endpoint {self.address or 'HOST'}:{self.port or PORT}"
            return [f"--rdzv-backend {self.rendezvous}{end} --rdzv-id 1"]
        rank = f"--node-rank {'RANK' if self.node_rank is None else self.node_rank}" if several else ""
        address = f"--master-addr {self.address or 'HOST'}" if several else ""
        return list(filter(None, (rank, address, f"--master-port {self.port}" if self.port not in (None, 0) else "")))


_VARIABLES = re.compile(r"(NCCL|GLOO|TORCH|PYTORCH|CUDA|OMP|UCX|FI)_\w+")
"""Environment variables of a command that a config keeps; others are the script's own, or secrets."""
_DEVICES, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
_INDEXES = re.compile(r"\d+(,\d+)*")
_Options = Mapping[str, str]


def launch_of(line: LaunchLine) -> tuple[Topology | None, Launch]:
    """The ranks of a command, where it says how many, and what it says about the processes."""
    options, settings = line.options, line.settings
    match line.launcher:
        case "torchrun":
            launch = _of_torchrun(options)
        case "deepspeed":
            launch = _of_deepspeed(options)
        case "accelerate":
            launch = _of_accelerate(options)
        case "llamafactory-cli":
            place = (settings.get("NODE_RANK"), settings.get("MASTER_ADDR"), settings.get("MASTER_PORT"))
            launch = Launch(_number(settings.get("NNODES", "1")), _number(settings.get("NPROC_PER_NODE")), *place)
        case _:
            launch = Launch()
    devices = settings.get(_DEVICES, "")
    if launch.devices is None and _INDEXES.fullmatch(devices):
        launch = replace(launch, devices=devices)
    if launch.processes is None and launch.devices and line.launcher == "deepspeed":
        launch = replace(launch, processes=launch.devices.count(",") + 1)
    restarts = options.get("max_restarts", "0")
    launch = replace(launch, max_restarts=int(restarts) if restarts.isdecimal() else 0)
    return _ranks(launch), replace(launch, environment=_environment(options, settings, launch))


def with_hosts(launch: Launch, hosts: Mapping[str, int]) -> tuple[Topology | None, Launch]:
    """The ranks and the launch of DeepSpeed's launcher with the hosts of its hostfile, of which options may take
    fewer.
    """
    first, slots = next(iter(hosts.items()))
    nodes = min(launch.nodes, len(hosts)) if isinstance(launch.nodes, int) else len(hosts)
    per_node = min(launch.processes, slots) if isinstance(launch.processes, int) else slots
    placed = replace(launch, nodes=nodes, processes=per_node, address=launch.address or first)
    return _ranks(placed), placed


def _environment(options: _Options, settings: _Options, launch: Launch) -> dict[str, str]:
    variables = {
        name: value for name, value in settings.items() if _VARIABLES.fullmatch(name) and not placeholders_in(value)
    }
    threads = options.get("num_cpu_threads_per_process", "")
    variables |= {_THREADS: threads} if threads.isdecimal() else {}
    variables |= {_DEVICES: launch.devices} if launch.devices and not placeholders_in(launch.devices) else {}
    return variables


def _of_torchrun(options: _Options) -> Launch:
    """As torchrun assumes, one process on one node unless they are given."""
    endpoint = options.get("rdzv_endpoint", "")
    host, _, port = (
        endpoint.rpartition(":") if endpoint else (options.get("master_addr", ""), "", options.get("master_port", ""))
    )
    address, port = (host, port) if host or not endpoint else (endpoint, "")
    backend = options.get("rdzv_backend", "static")
    return Launch(
        _number(options.get("nnodes", "1")),
        _number(options.get("nproc_per_node", "1")),
        options.get("node_rank"),
        address or None,
        port or None,
        None if backend == "static" else backend,
    )


def _of_deepspeed(options: _Options) -> Launch:
    hosts = options.get("hostfile", options.get("H"))
    nodes = options.get("num_nodes", None if hosts else "1")
    devices = _included(options.get("include", options.get("i", "")))
    processes = options.get("num_gpus") or (str(devices.count(",") + 1) if devices else None)
    place = (options.get("node_rank"), options.get("master_addr"), options.get("master_port"))
    return Launch(_number(nodes), _number(processes), *place, None, devices, hosts)


def _of_accelerate(options: _Options) -> Launch:
    nodes, total = _number(options.get("num_machines", "1")), _number(options.get("num_processes"))
    per_node = (
        total // nodes if isinstance(nodes, int) and isinstance(total, int) and nodes and total % nodes == 0 else None
    )
    devices = options.get("gpu_ids")
    place = (options.get("machine_rank"), options.get("main_process_ip"), options.get("main_process_port"))
    return Launch(nodes, per_node, *place, None, None if devices == "all" else devices)


def _ranks(launch: Launch) -> Topology | None:
    nodes, processes = launch.nodes, launch.processes
    if not isinstance(nodes, int) or not isinstance(processes, int) or nodes < 1 or processes < 1:
        return None
    return Topology(nodes * processes, processes)


def _number(text: str | None) -> int | str | None:
    """The number, or the text that stands for one."""
    return int(text) if text is not None and text.isdecimal() else text


def _included(text: str) -> str | None:
    """The GPUs of this machine that `--include` names."""
    host, _, devices = text.partition(":")
    return devices if host == "localhost" and _INDEXES.fullmatch(devices) else None
