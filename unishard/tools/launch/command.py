"""The torchrun command of a config and a script. Pure."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from unishard.config import Config
from unishard.config.launch import PORT
from unishard.config.loading.hostfile import hosts_of
from unishard.errors import ConfigError, Problem

_HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""What torchrun passes on to the ranks unless `--signals-to-handle` says otherwise (torch 2.13, distributed/run.py)."""
# With restarts each life of the ranks gets a store of its own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE). torch 2.13
# otherwise keeps one for all (dynamic_rendezvous.py, next_rendezvous), in which ranks that start anew find the
# addresses of those that are gone. `--` comes before a script with options: argparse of Python 3.11 takes its `--log`
# for an abbreviation of torchrun's `--log-dir`.
_SAVING = "300"
"""Seconds that ranks have for a save after a signal; torchrun's own 30 are too few (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)."""


class Script(NamedTuple):
    """What every rank runs."""

    name: str
    """A file, or a module with `-m`."""
    arguments: tuple[str, ...] = ()
    module: bool = False

    def words(self) -> list[str]:
        """As torchrun takes it."""
        options = any(argument.startswith("--") for argument in self.arguments)
        return [*(["-m"] if self.module else []), *(["--"] if options else []), self.name, *self.arguments]


class ShellText(str):
    """Text with variables for a shell to expand, such as `$head:$port`."""


class Host(NamedTuple):
    """What differs from the config where a job system decides it."""

    endpoint: str | None = None
    rendezvous_id: str | None = None
    node_rank: int | None = None
    processes: str | None = None
    """On each host, where the config leaves it open."""


@dataclass(frozen=True, slots=True)
class TorchrunCommand:
    """A command line with its environment."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """The command, ready to paste into a shell."""
        settings = [f"{name}={quoted(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, *map(quoted, self.words)])


def quoted(word: str) -> str:
    """A word for a shell, which expands the variables of a `ShellText` only."""
    return f'"{word}"' if isinstance(word, ShellText) else shlex.quote(word)


def torchrun_program() -> tuple[str, ...]:
    """`torchrun`, or this Python with its module where the one on the PATH is another Python's."""
    torchrun = shutil.which("torchrun")
    beside = Path(sys.executable).parent / "torchrun"
    return (
        ("torchrun",)
        if torchrun and Path(torchrun).parent == beside.parent
        else (sys.executable, "-m", "torch.distributed.run")
    )


def command_of(
    cfg: Config,
    script: Script,
    handed_over: Mapping[str, str],
    host: Host | None = None,
    *,
    program: Sequence[str] = ("torchrun",),
) -> TorchrunCommand:
    """The torchrun command of one host.

    Args:
        cfg: The config.
        script: What the ranks run.
        handed_over: Environment variables that tell the script its config.
        host: What the config leaves open.
        program: How torchrun is called.

    Raises:
        ConfigError: Several hosts have no place to meet.
    """
    host = host or Host()
    return TorchrunCommand((*program, *_options(cfg, host), *script.words()), {**handed_over, **environment_of(cfg)})


def environment_of(cfg: Config) -> dict[str, str]:
    """The environment variables of the ranks."""
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SAVING} if cfg.checkpoint.on_signal else {}
    anew = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if cfg.launch.max_restarts else {}
    return patience | anew | {name: str(value) for name, value in cfg.launch.environment.items()}


def _options(cfg: Config, host: Host) -> Iterator[str]:
    launch = cfg.launch
    endpoint = host.endpoint or launch.endpoint
    if launch.max_nodes > 1 and endpoint is None:
        problem = "is needed for several hosts; write HOST:PORT, with one of them as HOST, or start with --slurm"
        raise ConfigError([Problem("launch.endpoint", problem)])
    alone = endpoint is None
    if alone:
        yield "--standalone"
    else:
        yield from ("--nnodes", str(launch.nodes))
    yield from ("--nproc-per-node", str(launch.processes_per_node or host.processes or "gpu"))
    if endpoint is not None:
        yield from _meeting(cfg, host, endpoint)
    if launch.max_restarts:
        yield from ("--max-restarts", str(launch.max_restarts))
    if extra_signals := [name for name in cfg.checkpoint.on_signal if name not in _HANDLED]:
        yield from ("--signals-to-handle", ",".join((*_HANDLED, *extra_signals)))


def _meeting(cfg: Config, host: Host, endpoint: str) -> Iterator[str]:
    launch = cfg.launch
    if launch.rendezvous == "static":
        if host.node_rank is None:
            raise ConfigError(
                [Problem("launch.rendezvous", "static needs the number of this host; add --node-rank N, or write c10d")]
            )
        yield from ("--node-rank", str(host.node_rank))
    elif host.node_rank is not None:
        raise ConfigError(
            [
                Problem(
                    "launch.rendezvous",
                    f"{launch.rendezvous} numbers the hosts itself; leave out --node-rank, or write static",
                )
            ]
        )
    yield from ("--rdzv-backend", launch.rendezvous)
    yield from ("--rdzv-endpoint", endpoint if _has_port(endpoint) else f"{endpoint}:{PORT}")
    yield from ("--rdzv-id", launch.rendezvous_id or host.rendezvous_id or "unishard")
    if launch.rendezvous_options:
        yield from ("--rdzv-conf", ",".join(f"{key}={value}" for key, value in launch.rendezvous_options.items()))


def _has_port(endpoint: str) -> bool:
    return ":" in endpoint.rpartition("]")[2]


def overrides_of(path: Path) -> list[str]:
    """The overrides of a config that start the ranks of DeepSpeed's hostfile; the hosts meet at the first one.

    Raises:
        ConfigError: The file has other lines, no host, one host twice, or hosts with different numbers of slots.
    """
    hosts = hosts_of(path)
    first, slots = next(iter(hosts.items()))
    several = [f"launch.endpoint={first}:{PORT}"] if len(hosts) > 1 else []
    return [f"launch.nodes={len(hosts)}", f"launch.processes_per_node={slots}", *several]
