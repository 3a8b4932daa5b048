"""The process group of a run in use: its timeout, its device, and groups of the hosts."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unishard.config import Offload
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem, RankMismatchError

# -- The CUDA device of a rank, and the CPU threads of an offloaded optimizer ----------------------

_logger = logging.getLogger("unishard")


_own: int | None = None
"""Index of this rank's device: the current one of each new thread is 0."""


def use(index: int) -> None:
    """Make a device this rank's, in all its threads."""
    global _own
    torch.cuda.set_device(index)
    _own = index


def of_numbers() -> torch.device:
    """The device for small tensors in collectives of the default process group: the CPU, unless the group has only
    NCCL.
    """
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if _own is None else _own)


def choose(topology: Topology, *, shared: bool) -> int:
    """Index of this rank's CUDA device.

    A device that the caller has set is kept; torch itself starts on 0. Otherwise a rank that sees one device takes it,
    as under `srun --gpus-per-task=1`, and a rank that sees several takes the one at its local rank.

    Args:
        topology: The ranks.
        shared: Whether several ranks may share a device, which gloo allows and NCCL does not.

    Raises:
        ConfigError: The node has several visible devices, but fewer than ranks.
    """
    current, count = torch.cuda.current_device(), torch.cuda.device_count()
    if current or topology.launcher == "python":
        return current
    if topology.local_rank < count or count == 1:
        return min(topology.local_rank, count - 1)
    if shared:
        return topology.local_rank % count
    what = (
        f"local rank {topology.local_rank} has no CUDA device: the node shows only {count}, numbered from 0, and NCCL "
        "needs one for each "
        f"rank; start at most {count} ranks on a node (torchrun --nproc-per-node={count}), make one device visible to "
        "each rank "
        '(srun --gpus-per-task=1), or to share devices in a test call torch.distributed.init_process_group("gloo") '
        "before unishard"
    )
    raise ConfigError([Problem("", what)])


def of_everyone(index: int) -> list[tuple[str, str]]:
    """The host and the identity of each rank's device. Collective.

    Args:
        index: Index of this rank's device.
    """
    everyone: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid)))
    return everyone


def refuse_shared(index: int) -> None:
    """Check that no two ranks use the same device. Collective.

    Args:
        index: Index of this rank's device.

    Raises:
        ConfigError: On every rank, if two of them do; NCCL would fail in its first collective.
    """
    everyone = of_everyone(index)
    for rank, device in enumerate(everyone):
        first = everyone.index(device)
        if first != rank:
            what = (
                f"ranks {first} and {rank} use the same CUDA device of {device[0]}, which NCCL does not support; start "
                "one rank for each "
                "device (torchrun --nproc-per-node), or make one device visible to each rank (srun --gpus-per-task=1)"
            )
            raise ConfigError([Problem("", what)])


def use_host_cores(offload: Offload, topology: Topology) -> None:
    """Let an offloaded optimizer use this rank's share of the CPU cores if torchrun has limited it to one thread.

    torchrun sets OMP_NUM_THREADS=1 if it is unset and there are several ranks. Applied only with CUDA, where only the
    optimizer computes on the host: a model on the CPU keeps its number of threads, and with it the order of its sums.
    """
    one_thread = (
        os.environ.get("OMP_NUM_THREADS") == "1" and dist.is_torchelastic_launched() and topology.local_world_size > 1
    )
    if (offload.params, offload.optimizer) == ("none", "none") or not one_thread or not torch.cuda.is_available():
        return
    threads = len(os.sched_getaffinity(0)) // topology.local_world_size
    if threads > torch.get_num_threads():
        torch.set_num_threads(threads)
        _logger.info(
            "the offloaded optimizer uses %d threads per rank instead of torchrun's OMP_NUM_THREADS=1; set "
            "OMP_NUM_THREADS to override",
            threads,
        )


# -- all ranks hold the same values ----------------------------------------------------------------
# One all-reduce of 64 bytes while they do, whatever the number of ranks.

_SHOWN = 8
"""Ranks named for each value that differs."""
_MOST = 20
"""Values named."""
_MISSING = "nothing"


def agree(facts: dict[str, Any], what: str) -> None:
    """Check that all ranks have the same values. Collective; only a digest is sent unless they differ.

    Args:
        facts: Values by name, compared by their `repr`.
        what: What the values describe, for the message.

    Raises:
        RankMismatchError: On every rank; lists each name that differs, with the values of up to 8 ranks.
    """
    texts = {name: repr(value) for name, value in facts.items()}
    if not _same(hashlib.sha256(repr(texts).encode()).digest()):
        raise RankMismatchError(f"ranks hold different {what}; start every rank with the same:\n{_differences(texts)}")


def _same(digest: bytes) -> bool:
    """Whether all ranks have one digest: its least and its largest value are the same. Collective."""
    words = [int.from_bytes(digest[at : at + 7], "big") for at in range(0, 28, 7)]
    both = torch.tensor([*words, *(-word for word in words)], dtype=torch.int64, device=of_numbers())
    dist.all_reduce(both, dist.ReduceOp.MIN)
    least = both.tolist()
    return all(low == -high for low, high in zip(least[:4], least[4:], strict=True))


def _differences(texts: Mapping[str, str]) -> str:
    """The values that differ, one line each.

    Collective: each rank compares with rank 0 and sends what differs; rank 0 tells all.
    """
    rank = dist.get_rank()
    said: list[Any] = [{name: _short(text) for name, text in texts.items()} if rank == 0 else None]
    dist.broadcast_object_list(said, src=0)
    names = dict.fromkeys((*said[0], *texts))
    own = [name for name in names if said[0].get(name) != (_short(texts[name]) if name in texts else None)]
    everyone: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object({name: texts.get(name, _MISSING) for name in own[:_MOST]}, everyone, dst=0)
    lines = [_described(texts, everyone) if everyone is not None else ""]
    dist.broadcast_object_list(lines, src=0)
    return lines[0]


def _described(first: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> str:
    """On rank 0: one line for each name that differs.

    Args:
        first: The values of rank 0.
        others: For each rank, what is not as on rank 0.
    """
    differing = dict.fromkeys(name for theirs in others for name in theirs)
    order = [*(name for name in first if name in differing), *(name for name in differing if name not in first)]
    lines = []
    for name in order[:_MOST]:
        values = {rank: theirs[name] for rank, theirs in enumerate(others) if name in theirs}
        shown = range(len(others)) if len(others) <= _SHOWN else sorted({0, *list(values)[: _SHOWN - 1]})
        held = [f"rank {rank} has {values.get(rank, first.get(name, _MISSING))}" for rank in shown]
        more = (
            f" and {len(values) + 1 - _SHOWN} more ranks have other values"
            if len(values) >= _SHOWN and len(others) > _SHOWN
            else ""
        )
        lines.append(f"{name}: " + ", ".join(held) + more)
    return "\n".join(lines)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


TIMEOUT = timedelta(minutes=30)
"""Timeout of collectives, over gloo and NCCL; when it expires, torch ends the process with its own report."""

_host_groups: dict[Any, dist.ProcessGroup] = {}
_spare_groups: dict[Any, list[dist.ProcessGroup]] = {}
"""For each default group, the groups that were given back."""


def device_of(topology: Topology) -> torch.device:
    """The device of this rank: its own CUDA device if there is one, else the CPU."""
    return torch.device("cuda", choose(topology, shared=True)) if torch.cuda.is_available() else torch.device("cpu")


def host_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, for the main thread and the check of its calls. Collective at the first call."""
    world = dist.group.WORLD
    if world not in _host_groups:
        _host_groups.clear()
        _host_groups[world] = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return _host_groups[world]


def borrow_group() -> dist.ProcessGroup:
    """A gloo group of all ranks for one background thread: threads must not share a group, or their messages mix.

    Collective.

    All ranks must borrow and give back in the same order.
    """
    world = dist.group.WORLD
    spare = _spare_groups.get(world)
    return spare.pop() if spare else dist.new_group(backend="gloo")


def give_back(group: dist.ProcessGroup, world: Any) -> None:
    """Return a borrowed group for reuse.

    It is not destroyed, since a slower rank may still be reading its last message.

    Args:
        group: From `borrow_group`; no longer in use.
        world: The default group at that time.
    """
    if dist.is_initialized() and world is dist.group.WORLD:
        _spare_groups.setdefault(world, []).append(group)


def forget_groups() -> None:
    """Drop the groups of a process group that is destroyed."""
    _host_groups.clear()
    _spare_groups.clear()
