"""What a command says in the words of the section `launch`, one entry for each of its options about hosts and
processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unishard.config.launch import PORT
from unishard.contract.entries import Entry, KeyEffect
from unishard.contract.rules import Fit
from unishard.contract.templates import placeholders_in
from unishard.formats.launch.line import LaunchLine
from unishard.formats.launch.processes import Launch
from unishard.formats.names import names

_NUMBER = re.compile(r"\d+")
_RANGE = re.compile(r"[1-9]\d*(:[1-9]\d*)?")
_RENDEZVOUS = ("static", "c10d", "etcd-v2", "etcd")
_ONE_HOST = "only used with several hosts; one host takes a free port"
_NUMBERED = "the hosts are numbered as they meet; for a fixed number set launch.rendezvous=static and add --node-rank"
_FILTERED = "names some GPUs of some hosts; as many ranks start on each host: set launch.processes_per_node"
_EACH_GPU = "one rank for each GPU, as launch.processes_per_node: null"
_REACHED = "how DeepSpeed reaches the hosts; start the launcher on each host"

_Read = Callable[[str, Launch], KeyEffect]


def launch_entries(line: LaunchLine, launch: Launch, place: str) -> Iterator[Entry]:
    """The entries of a command.

    Args:
        line: The command.
        launch: What it comes to.
        place: What the report calls the command.
    """
    for option, text in line.options.items():
        if read := _OPTIONS.get(option):
            dashed = f"{'-' if len(option) == 1 else '--'}{option.replace('_', '-')}"
            yield _entry(f"{line.launcher} {dashed}", text, read(text, launch), place)
    for name, text in line.settings.items():
        if name in launch.environment:
            yield _entry(name, text, _environment(text, launch), place)
        elif read := _SETTINGS.get(name):
            yield _entry(name, text, read(text, launch), place)
    yield from _unsaid(line, launch)


def _entry(name: str, text: str, effect: KeyEffect, place: str) -> Entry:
    return Entry((name,), text, effect._replace(notable=True), place=place, supplied=True)


def _unsaid(line: LaunchLine, launch: Launch) -> Iterator[Entry]:
    """What torchrun assumes."""
    if line.launcher == "torchrun" and "nproc_per_node" not in line.options:
        effect = KeyEffect(fields={"launch.processes_per_node": launch.processes})
        yield Entry(
            ("torchrun --nproc-per-node",),
            launch.processes,
            effect,
            assumed=True,
            place="default of torchrun",
            supplied=True,
        )


def _left(note: str) -> KeyEffect:
    return KeyEffect(Fit.IGNORED, note)


def _open(text: Any, field: str) -> KeyEffect:
    """A value that the section does not take."""
    return _left(f"the section launch does not take {text}; set {field}")


def _several(launch: Launch) -> bool:
    return launch.nodes not in (None, 1)


def _nodes(text: str, launch: Launch) -> KeyEffect:
    if isinstance(launch.nodes, int) and launch.nodes > 0:
        return KeyEffect(fields={"launch.nodes": launch.nodes})
    if _RANGE.fullmatch(str(launch.nodes)):
        return KeyEffect(fields={"launch.nodes": launch.nodes})
    return _open(text, "launch.nodes")


def _processes(text: str, launch: Launch) -> KeyEffect:
    if isinstance(launch.processes, int) and launch.processes > 0:
        return KeyEffect(fields={"launch.processes_per_node": launch.processes})
    return _left(_EACH_GPU) if text in ("gpu", "auto") else _open(text, "launch.processes_per_node")


def _endpoint(text: str, launch: Launch) -> KeyEffect:
    if not _several(launch):
        return _left(_ONE_HOST)
    for part in (launch.address, launch.port):
        if part is not None and placeholders_in(part):
            return _open(part, "launch.endpoint")
    if launch.address is None:
        return _left("the host is not said; set launch.endpoint")
    return KeyEffect(fields={"launch.endpoint": f"{launch.address}:{launch.port or PORT}"})


def _rendezvous(text: str, launch: Launch) -> KeyEffect:
    if not _several(launch):
        return _left(_ONE_HOST)
    return KeyEffect(fields={"launch.rendezvous": text}) if text in _RENDEZVOUS else _open(text, "launch.rendezvous")


def _rendezvous_id(text: str, launch: Launch) -> KeyEffect:
    if not _several(launch):
        return _left(_ONE_HOST)
    return KeyEffect(fields={"launch.rendezvous_id": text})


def _rendezvous_options(text: str, launch: Launch) -> KeyEffect:
    options = dict(part.partition("=")[::2] for part in text.split(",") if "=" in part)
    if not options:
        return _open(text, "launch.rendezvous_options")
    return KeyEffect(
        fields={
            "launch.rendezvous_options": {
                key: int(value) if value.isdecimal() else value for key, value in options.items()
            }
        }
    )


def _restarts(text: str, launch: Launch) -> KeyEffect:
    return (
        KeyEffect(fields={"launch.max_restarts": int(text)})
        if _NUMBER.fullmatch(text)
        else _open(text, "launch.max_restarts")
    )


def _environment(text: str, launch: Launch) -> KeyEffect:
    return KeyEffect(fields={"launch.environment": dict(launch.environment)})


def _devices(text: str, launch: Launch) -> KeyEffect:
    if text == "all":
        return _left("every rank sees all GPUs of its host")
    return _environment(text, launch) if launch.devices == text else _open(text, "launch.environment")


def _included(text: str, launch: Launch) -> KeyEffect:
    if launch.devices is None:
        return _left(_FILTERED)
    return _environment(text, launch)._replace(
        fields={"launch.processes_per_node": launch.processes, "launch.environment": dict(launch.environment)}
    )


def _hosts(text: str, launch: Launch) -> KeyEffect:
    if not isinstance(launch.nodes, int) or launch.hosts is None:
        return _left("file not found: its hosts are unknown; set launch.nodes")
    fields = {"launch.nodes": launch.nodes, "launch.processes_per_node": launch.processes}
    if launch.nodes > 1 and not placeholders_in(launch.address):
        fields["launch.endpoint"] = f"{launch.address}:{launch.port or PORT}"
    return KeyEffect(fields=fields)


def _says(note: str) -> _Read:
    return lambda text, launch: _left(note)


def _threads(text: str, launch: Launch) -> KeyEffect:
    return _environment(text, launch) if "OMP_NUM_THREADS" in launch.environment else _open(text, "launch.environment")


_OPTIONS: Mapping[str, _Read] = {
    **dict.fromkeys(names("nnodes num_nodes num_machines"), _nodes),
    **dict.fromkeys(names("nproc_per_node num_gpus num_processes"), _processes),
    **dict.fromkeys(names("rdzv_endpoint master_addr master_port main_process_ip main_process_port"), _endpoint),
    "rdzv_backend": _rendezvous,
    "rdzv_id": _rendezvous_id,
    "rdzv_conf": _rendezvous_options,
    "max_restarts": _restarts,
    **dict.fromkeys(names("node_rank machine_rank"), _says(_NUMBERED)),
    "gpu_ids": _devices,
    **dict.fromkeys(names("include i"), _included),
    **dict.fromkeys(names("exclude e"), _says(_FILTERED)),
    **dict.fromkeys(names("hostfile H"), _hosts),
    "num_cpu_threads_per_process": _threads,
    **dict.fromkeys(
        names("tee t redirects r role log_dir local_ranks_filter monitor_interval start_method enable_each_rank_log"),
        _says("affects only what the launcher shows and where its logs are"),
    ),
    **dict.fromkeys(names("launcher launcher_args ssh_port no_ssh force_multi venv_script"), _says(_REACHED)),
}
_SETTINGS: Mapping[str, _Read] = {
    "NNODES": _nodes,
    "NPROC_PER_NODE": _processes,
    **dict.fromkeys(names("MASTER_ADDR MASTER_PORT"), _endpoint),
    "NODE_RANK": _says(_NUMBERED),
}
"""Environment variables that launchers read."""
