"""Checks whether the hosts of a run reach each other, and runs its script: `python -m
unishard.tools.doctor.before_script [-m] SCRIPT ARGS`.

`unishard launch` starts the ranks of several hosts so, unless `--no-check` is given. One rank of each host takes part.
The check says nothing when all is well, and never ends a run: it names what is wrong before the script waits for it.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from unishard.tools.doctor.imports import one_line

_SECONDS = 5.0
"""How long each of arriving and connecting may take."""
_BYTES = 2**20
_SLOW_BYTES, _SLOW_SECONDS = 10e6, 0.1
"""Below this rate in bytes per second, and above this time of a small message, a training of several hosts mostly
waits."""
_NEEDED = ("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE")
_HINT = (
    "see a firewall, the address of each host's name, and GLOO_SOCKET_IFNAME; unishard doctor says more, "
    "--no-check leaves this out"
)


def main(words: Sequence[str]) -> None:
    """Check, and run a script as the main program of this process.

    Args:
        words: `-m` for a module, its name or the path of a script, and its arguments.
    """
    _checked()
    module = words[0] == "-m"
    name, *arguments = words[1:] if module else words
    sys.argv = [name, *arguments]
    if module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


def _checked() -> None:
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    # Only torchrun's agent keeps the store open in which ranks meet twice.
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and all(name in os.environ for name in _NEEDED)
    if hosts > 1 and shared and os.environ.get("LOCAL_RANK") == "0" and (problem := check(os.environ)):
        sys.stderr.write(f"unishard launch: {problem}\n")
        sys.stderr.flush()


def check(environ: Mapping[str, str], seconds: float = _SECONDS) -> str:
    """Connect one rank of each host over gloo, and send a message around. Collective among these ranks.

    Args:
        environ: What torchrun tells a rank.
        seconds: How long each of arriving and connecting may take.

    Returns:
        What is wrong; empty if nothing is, or if another host is late.
    """
    import torch.distributed as dist

    rank, hosts = int(environ["GROUP_RANK"]), int(environ["GROUP_WORLD_SIZE"])
    where, limit = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}", timedelta(seconds=seconds)
    here = f"host {rank} of {hosts} ({socket.gethostname()})"
    connect: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
    try:
        store = connect(
            environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=limit, wait_for_workers=False
        )
    except RuntimeError as error:
        return f"{here} does not reach {where}: {one_line(error)}; {_HINT}"
    life = f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    place = dist.PrefixStore(f"unishard/check/{life}", store)  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
    if not _all_here(place, rank, hosts, limit):
        return ""
    try:
        dist.init_process_group("gloo", store=place, rank=rank, world_size=hosts, timeout=limit)
    except RuntimeError as error:
        return f"{here} does not connect to the others over gloo: {one_line(error)}; {_HINT}"
    try:
        return _slow(here, rank, hosts)
    except RuntimeError as error:
        return f"{here} lost the others: {one_line(error)}; {_HINT}"
    finally:
        dist.destroy_process_group()


def _all_here(store: Any, rank: int, hosts: int, limit: timedelta) -> bool:
    """Whether each host arrives in time.

    One that is late lets all go on without the check: its script may only take long to start.
    """
    store.set(f"here/{rank}", "1")
    try:
        store.wait([f"here/{other}" for other in range(hosts)], limit)
    except RuntimeError:  # torch's DistStoreError
        store.set("late", "1")
    return not store.check(["late"])


def _slow(here: str, rank: int, hosts: int) -> str:
    """What a message to the next host and back says of the link; empty if it is fast enough."""
    import torch
    import torch.distributed as dist

    small, large = torch.zeros(1), torch.zeros(_BYTES // 4)
    times = []
    for tensor in (small, small, large):  # the first one sets up connections
        began = time.perf_counter()
        sent = dist.isend(tensor, (rank + 1) % hosts)
        dist.recv(torch.empty_like(tensor), (rank - 1) % hosts)
        if sent is not None:
            sent.wait()
        dist.barrier()
        times.append(time.perf_counter() - began)
    latency, rate = times[1], _BYTES / max(times[2], 1e-9)
    if rank or (latency < _SLOW_SECONDS and rate > _SLOW_BYTES):
        return ""
    return (
        f"the network between the {hosts} hosts is slow ({latency * 1e3:.0f} ms for 4 bytes, {rate / 1e6:.1f} MB/s "
        f"over gloo); {_HINT}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
