"""Connects the ranks: rendezvous, versions, and one all-reduce over gloo and over NCCL.

Run by every rank.

`python -m unishard.tools.doctor.ranks` does it alone and prints rank 0's checks as JSON, for
`unishard doctor --ranks N`.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from unishard.config.describe import count_of
from unishard.config.rendezvous import rendezvous, store_of_launcher
from unishard.config.topology import Topology
from unishard.distributed import devices, serving
from unishard.tools.doctor.check import Check, Status
from unishard.tools.doctor.imports import one_line

_TIMEOUT = timedelta(seconds=60)
_PACKAGES = ("unishard", "torch", "deepspeed", "transformers")


def connections(topology: Topology) -> list[Check]:
    """Connect all ranks, compare their versions, and reduce a tensor over them.

    Collective; on other ranks than the first the list is empty, but for a failed rendezvous.
    """
    began = time.monotonic()
    try:
        dist.init_process_group(
            "gloo", rank=topology.rank, world_size=topology.world_size, timeout=_TIMEOUT, **_meeting(topology)
        )
    except (RuntimeError, ValueError) as error:
        return [_not_connected(topology, error)]
    seconds = time.monotonic() - began
    try:
        checks = list(_compared(topology, seconds))
    except RuntimeError as error:  # a rank that ended, a network that broke
        where = f"rank {topology.rank} on {socket.gethostname()}"
        return [
            Check(
                "ranks",
                Status.FAIL,
                f"{where} lost the others: {one_line(error)}",
                "look at the output of the other ranks",
            )
        ]
    finally:
        dist.destroy_process_group()
    return checks if topology.rank == 0 else []


def _meeting(topology: Topology) -> dict[str, Any]:
    """Where the ranks meet: as in `prepare`, so that a run on this host listens to no other one."""
    method = rendezvous(topology)
    if method is not None and topology.rank == 0:
        host, port, served = store_of_launcher(method)
        if not served and serving.is_loopback(host):
            store = serving.serve(host, port, topology.world_size, _TIMEOUT)
            return {"store": dist.PrefixStore("default_pg", store)}  # type: ignore[attr-defined]  # torch 2.13 exports it without __all__
    return {"init_method": method}


def _not_connected(topology: Topology, error: Exception) -> Check:
    problem = (
        f"rank {topology.rank} of {topology.world_size} on {socket.gethostname()} did not meet the others: "
        f"{one_line(error)}"
    )
    instead = (
        "check that all ranks were started, and that MASTER_ADDR:MASTER_PORT is reachable from every host "
        "(firewall, interface)"
    )
    return Check("rendezvous", Status.FAIL, problem, instead)


def _compared(topology: Topology, seconds: float) -> Iterator[Check]:
    hosts = _gathered(socket.gethostname())
    yield _ranks(hosts, seconds)
    yield _versions(hosts, _gathered(_own_versions()))
    yield _all_reduce("gloo", torch.device("cpu"))
    if torch.cuda.is_available():
        index = devices.choose(topology, shared=True)
        everyone = devices.of_everyone(index)
        one_device_each = len(set(everyone)) == len(everyone)
        yield _over_nccl(index) if one_device_each else Check("nccl", Status.OK, "not tried: ranks share a device")


def _ranks(hosts: Sequence[str], seconds: float) -> Check:
    counts = Counter(hosts)
    words = ", ".join(f"{host}: {count}" for host, count in list(counts.items())[:8]) + (
        ", ..." if len(counts) > 8 else ""
    )
    details = {"world_size": len(hosts), "hosts": dict(counts), "rendezvous_s": round(seconds, 3)}
    result = f"{len(hosts)} on {count_of(len(counts), 'host')} ({words}), met in {seconds:.1f} s"
    return Check("ranks", Status.OK, result, details=details)


def _own_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _versions(hosts: Sequence[str], everyone: Sequence[dict[str, str]]) -> Check:
    differing = []
    for name in everyone[0]:
        by_version = {versions[name]: host for host, versions in reversed(list(zip(hosts, everyone, strict=True)))}
        if len(by_version) > 1:
            differing.append(f"{name} {' and '.join(f'{number} on {host}' for number, host in by_version.items())}")
    if differing:
        return Check(
            "versions of the ranks", Status.WARN, "; ".join(differing), "install the same versions on all hosts"
        )
    return Check("versions of the ranks", Status.OK, "the same on all")


def _over_nccl(index: int) -> Check:
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return _all_reduce("nccl", device, dist.new_group(backend="nccl", timeout=_TIMEOUT))


def _all_reduce(backend: str, device: torch.device, group: Any = None) -> Check:
    """Sum a one over all ranks."""
    total = torch.ones(1, device=device)
    dist.all_reduce(total, group=group)
    ranks, summed = dist.get_world_size(), int(total.item())
    if summed != ranks:
        result = f"an all-reduce of a 1 from each of {count_of(ranks, 'rank')} gives {summed}"
        return Check(backend, Status.FAIL, result, "update the driver and the communication library")
    return Check(backend, Status.OK, f"all-reduce over {count_of(ranks, 'rank')}")


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _main() -> None:
    checks = connections(Topology.from_environment())
    json.dump([dataclasses.asdict(check) for check in checks], sys.stdout)
    sys.exit(any(check.status is Status.FAIL for check in checks))


if __name__ == "__main__":
    _main()
