"""DeepSpeed's hostfile: one line for each host, `NAME slots=N` (deepspeed 0.19.8, launcher/runner.py)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from unishard.config import Config
from unishard.config.loading.hostfile import hosts_of
from unishard.errors import ConfigError, Problem
from unishard.tools.launch.command import PORT, Script

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_ENDPOINT = re.compile(r"(\[.*\]|[^:]+)(?::(\d+))?")


def overrides_of(path: Path) -> list[str]:
    """The overrides of a config that start the ranks of a hostfile; the hosts meet at the first one.

    Raises:
        ConfigError: The file has other lines, no host, one host twice, or hosts with different numbers of slots.
    """
    hosts = hosts_of(path)
    first, each = next(iter(hosts.items()))
    several = [f"launch.endpoint={first}:{PORT}"] if len(hosts) > 1 else []
    return [f"launch.nodes={len(hosts)}", f"launch.processes_per_node={each}", *several]


def hostfile(cfg: Config, hosts: Sequence[str], script: Script, path: str) -> str:
    """The hostfile of named hosts, headed by the command that takes it.

    Args:
        cfg: The config.
        hosts: Their names; the first one has rank 0.
        script: What the ranks run.
        path: Of the file, for the command.

    Raises:
        ConfigError: A name is none, or the section `launch` asks for other hosts.
    """
    launch = cfg.launch
    problems = [
        Problem("", f"{name!r} is no name of a host; write it as head or node-1.cluster")
        for name in hosts
        if not _NAME.fullmatch(name)
    ]
    if len(set(hosts)) < len(hosts):
        problems.append(Problem("", f"names a host twice: {', '.join(hosts)}; write each once"))
    if not launch.min_nodes <= len(hosts) <= launch.max_nodes:
        problems.append(
            Problem(
                "launch.nodes",
                f"is {launch.nodes}, but {len(hosts)} hosts are named; make them equal (--nodes {len(hosts)})",
            )
        )
    if launch.processes_per_node is None:
        problems.append(Problem("launch.processes_per_node", "is the number of slots of each host; write a number"))
    said = _ENDPOINT.fullmatch(launch.endpoint or "")
    head, port = said.groups() if said else (None, None)
    if head and head != hosts[0]:
        problems.append(
            Problem("launch.endpoint", f"is on {head}, and DeepSpeed's hosts meet at the first one; name {head} first")
        )
    if problems:
        raise ConfigError(problems)
    meeting = ["--master_port", port or str(PORT)] if len(hosts) > 1 else []
    named = [*(["--module"] if script.module else []), "--no_local_rank", script.name]
    command = ["deepspeed", "--hostfile", path, *meeting, *named, *script.arguments]
    lines = [f"# {shlex.join(command)}", *(f"{name} slots={launch.processes_per_node}" for name in hosts)]
    return "\n".join(lines) + "\n"
