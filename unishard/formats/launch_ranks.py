"""How many processes a launch line starts, and where they meet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from unishard.config.topology import Topology
from unishard.formats.launch_line import LaunchLine
from unishard.formats.launching import Launch

__all__ = ["launch_of"]

_SBATCH = re.compile(r"^#SBATCH[ \t]+--?([\w-]+)[= \t]([^\s#]+)", re.MULTILINE)
_INDEXES = re.compile(r"\d+(,\d+)*")
_LOCAL = "localhost"
_Options = Mapping[str, str]


def launch_of(line: LaunchLine, script: str = "") -> tuple[Topology | None, Launch]:
    """The ranks of a launch line, where it says how many, and what it says about the processes.

    Args:
        line: The launch line.
        script: The text around it, for what `#SBATCH` says of a job that srun starts.
    """
    said = {key: word.text for key, word in line.options.items()}
    settings = {key: word.text for key, word in line.settings.items()}
    match line.launcher:
        case "torchrun":
            launch = _of_torchrun(said)
        case "deepspeed":
            launch = _of_deepspeed(said)
        case "accelerate":
            launch = _of_accelerate(said)
        case "swift" | "llamafactory-cli":
            launch = Launch(_number(settings.get("NNODES", "1")), _number(settings.get("NPROC_PER_NODE")))
        case _:
            job = {key.replace("-", "_"): value for key, value in _SBATCH.findall(script)} if said else {}
            launch = _of_tasks({**job, **said})
    devices = settings.get("CUDA_VISIBLE_DEVICES", "")
    if launch.devices is None and _INDEXES.fullmatch(devices):
        launch = replace(launch, devices=devices)
    if launch.processes is None and launch.devices and line.launcher == "deepspeed":
        launch = replace(launch, processes=launch.devices.count(",") + 1)
    return _ranks(launch), launch


def _of_torchrun(said: _Options) -> Launch:
    """As torchrun assumes, one process on one node unless it is told."""
    endpoint = said.get("rdzv_endpoint", "")
    address, _, port = endpoint.rpartition(":") if endpoint else (said.get("master_addr", ""), "", said.get("master_port", ""))
    backend = said.get("rdzv_backend", "static")
    return Launch(
        _number(said.get("nnodes", "1")),
        _number(said.get("nproc_per_node", "1")),
        said.get("node_rank"),
        address or None,
        port or None,
        None if backend == "static" else backend,
    )


def _of_deepspeed(said: _Options) -> Launch:
    hosts = said.get("hostfile", said.get("H"))
    nodes = said.get("num_nodes", None if hosts else "1")
    devices = _included(said.get("include", said.get("i", "")))
    processes = said.get("num_gpus") or (str(devices.count(",") + 1) if devices else None)
    place = (said.get("node_rank"), said.get("master_addr"), said.get("master_port"))
    return Launch(_number(nodes), _number(processes), *place, None, devices, hosts)


def _of_accelerate(said: _Options) -> Launch:
    nodes, total = _number(said.get("num_machines", "1")), _number(said.get("num_processes"))
    each = total // nodes if isinstance(nodes, int) and isinstance(total, int) and nodes and total % nodes == 0 else None
    devices = said.get("gpu_ids")
    place = (said.get("machine_rank"), said.get("main_process_ip"), said.get("main_process_port"))
    return Launch(nodes, each, *place, None, None if devices == "all" else devices)


def _of_tasks(said: _Options) -> Launch:
    """What srun, with the job around it, or mpirun starts."""
    nodes, total = _number(said.get("nodes", said.get("N"))), _number(said.get("ntasks", said.get("n", said.get("np"))))
    each = _number(said.get("ntasks_per_node"))
    if each is None and isinstance(total, int):
        each = total if nodes is None else total // nodes if isinstance(nodes, int) and nodes and total % nodes == 0 else None
    return Launch(1 if nodes is None and each is not None else nodes, each)


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
    return devices if host == _LOCAL and _INDEXES.fullmatch(devices) else None
