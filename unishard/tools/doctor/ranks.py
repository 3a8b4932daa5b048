"""Measures what connects the ranks: rendezvous, collectives over gloo and NCCL, links between hosts, clocks.

Run by every rank.

`python -m unishard.tools.doctor.ranks` does it alone and prints rank 0's checks as JSON, for
`unishard doctor --ranks N`.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.config.describe import count_of
from unishard.config.topology import Topology, rendezvous, store_of_launcher
from unishard.distributed import process_group, serving
from unishard.tools.doctor.check import Check, Status, one_line

_TIMEOUT = timedelta(seconds=60)
_TIMES = 20
_GLOO_BYTES = 16 * 2**20
_NCCL_BYTES = 256 * 2**20
_LINK_BYTES = 8 * 2**20
_CLOCK = 1.0
"""Seconds by which clocks may differ."""
_MOST_LINKS = 64
_PACKAGES = ("unishard", "torch", "deepspeed", "transformers")


def connections(topology: Topology) -> list[Check]:
    """Connect all ranks and measure.

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
        checks = [check for check in _measured(topology, seconds) if check is not None]
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
    found = (
        f"rank {topology.rank} of {topology.world_size} on {socket.gethostname()} did not meet the others: "
        f"{one_line(error)}"
    )
    instead = (
        "check that all ranks were started, and that MASTER_ADDR:MASTER_PORT is reachable from every host "
        "(firewall, interface)"
    )
    return Check("rendezvous", Status.FAIL, found, instead)


def _measured(topology: Topology, seconds: float) -> Iterator[Check | None]:
    hosts = _gathered(socket.gethostname())
    yield _ranks(hosts, seconds)
    yield _versions(hosts, _gathered(_own_versions()))
    yield _collectives("gloo", torch.device("cpu"), _GLOO_BYTES, None)
    if torch.cuda.is_available():
        index = process_group.choose(topology, shared=True)
        everyone = process_group.of_everyone(index)
        own = len(set(everyone)) == len(everyone)
        yield _over_nccl(index) if own else Check("nccl", Status.OK, "not measured: ranks share a device")
    yield _links(hosts)
    yield _clocks(hosts)


def _ranks(hosts: Sequence[str], seconds: float) -> Check:
    counts = Counter(hosts)
    words = ", ".join(f"{host}: {count}" for host, count in list(counts.items())[:8]) + (
        ", ..." if len(counts) > 8 else ""
    )
    details = {"world_size": len(hosts), "hosts": dict(counts), "rendezvous_s": round(seconds, 3)}
    found = f"{len(hosts)} on {count_of(len(counts), 'host')} ({words}), met in {seconds:.1f} s"
    return Check("ranks", Status.OK, found, details=details)


def _own_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _versions(hosts: Sequence[str], everyone: Sequence[dict[str, str]]) -> Check:
    differing = []
    for name in everyone[0]:
        by_version = {each[name]: host for host, each in reversed(list(zip(hosts, everyone, strict=True)))}
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
    group = dist.new_group(backend="nccl", timeout=_TIMEOUT)
    return _collectives("nccl", device, _NCCL_BYTES, group)


def _collectives(name: str, device: torch.device, size: int, group: Any) -> Check:
    """Time all-reduces of all ranks: of 4 bytes for the latency, of a large tensor for the bus bandwidth.

    The bus bandwidth is 2 (n - 1) / n x bytes / time, as nccl-tests defines it: comparable with that of a link,
    whatever n is.
    """
    world = dist.get_world_size()
    small, large = torch.zeros(1, device=device), torch.zeros(size // 4, device=device)
    latency = statistics.median(_times(small, group, _TIMES))
    seconds = statistics.median(_times(large, group, 3))
    rate = 2 * (world - 1) / world * size / max(seconds, 1e-9)
    found = f"all-reduce: {latency * 1e6:.0f} us for 4 bytes" + (
        f", bus bandwidth {rate / 1e9:.2f} GB/s" if world > 1 else ""
    )
    return Check(name, Status.OK, found, details={"latency_s": latency, "bus_bytes_per_s": round(rate), "bytes": size})


def _times(tensor: Tensor, group: Any, times: int) -> list[float]:
    found = []
    for _ in range(times + 2):  # the first two set up connections
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        found.append(time.perf_counter() - began)
    return found[2:]


def _links(hosts: Sequence[str]) -> Check | None:
    """Time a message from each rank to the next, one pair at a time; with many ranks only the first rank of each
    host.
    """
    members = list(range(len(hosts)))
    if len(members) > _MOST_LINKS:
        members = [hosts.index(host) for host in dict.fromkeys(hosts)][:_MOST_LINKS]
    if len(members) < 2:
        return None
    pairs = [(one, members[(place + 1) % len(members)]) for place, one in enumerate(members)][
        : len(members) if len(members) > 2 else 1
    ]
    own = {pair: seconds for pair in pairs if (seconds := _message(*pair)) is not None}
    timed = {pair: seconds for each in _gathered(own) for pair, seconds in each.items()}
    (source, target), slowest = max(timed.items(), key=lambda item: item[1])
    rate = _LINK_BYTES / max(slowest, 1e-9)
    found = (
        f"slowest of {len(timed)}: {rate / 1e9:.2f} GB/s, rank {source} on {hosts[source]} to rank {target} on "
        f"{hosts[target]}"
    )
    details = {
        "links": [
            {"from": pair[0], "to": pair[1], "bytes_per_s": round(_LINK_BYTES / max(s, 1e-9))}
            for pair, s in timed.items()
        ]
    }
    return Check("links", Status.OK, found, details=details)


def _message(source: int, target: int) -> float | None:
    """Send over gloo and wait for an answer; the time on the rank that sends, None on the others."""
    rank, large, small = dist.get_rank(), torch.zeros(_LINK_BYTES // 4), torch.zeros(1)
    seconds = None
    for _ in range(2):  # the first one connects the two
        if rank == source:
            began = time.perf_counter()
            dist.send(large, target)
            dist.recv(small, target)
            seconds = time.perf_counter() - began
        elif rank == target:
            dist.recv(large, source)
            dist.send(small, source)
    return seconds


def _clocks(hosts: Sequence[str]) -> Check:
    """Compare the clock of each host with that of rank 0, in the shortest of a few round trips."""
    apart: dict[str, float] = {}
    for host, other in {host: hosts.index(host) for host in hosts}.items():
        if other == 0:
            continue
        trips = []
        for _ in range(5):
            clock = torch.zeros(1, dtype=torch.float64)
            if dist.get_rank() == 0:
                sent = time.time()
                dist.send(clock, other)
                dist.recv(clock, other)
                back = time.time()
                trips.append((back - sent, abs(clock.item() - (sent + back) / 2)))
            elif dist.get_rank() == other:
                dist.recv(clock, 0)
                clock[0] = time.time()
                dist.send(clock, 0)
        if trips:
            apart[host] = min(trips)[1]
    if not apart:
        return Check("clocks", Status.OK, "one host")
    host, most = max(apart.items(), key=lambda item: item[1])
    details = {"seconds": apart}
    if most > _CLOCK:
        return Check(
            "clocks",
            Status.WARN,
            f"{host} is {most:.1f} s apart from {hosts[0]}",
            "synchronize the clocks (chrony, ntp)",
            details,
        )
    return Check("clocks", Status.OK, f"at most {most * 1e3:.1f} ms apart", details=details)


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
