"""The CUDA device of a rank, and the CPU threads of an offloaded optimizer."""

from __future__ import annotations

import logging
import os
import socket

import torch
import torch.distributed as dist

from unishard.config import Offload
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem

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
    problem = (
        f"local rank {topology.local_rank} has no CUDA device: the node shows only {count}, numbered from 0, and NCCL "
        "needs one for each "
        f"rank; start at most {count} ranks on a node (torchrun --nproc-per-node={count}), make one device visible to "
        "each rank "
        '(srun --gpus-per-task=1), or to share devices in a test call torch.distributed.init_process_group("gloo") '
        "before unishard"
    )
    raise ConfigError([Problem("", problem)])


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
            problem = (
                f"ranks {first} and {rank} use the same CUDA device of {device[0]}, which NCCL does not support; start "
                "one rank for each "
                "device (torchrun --nproc-per-node), or make one device visible to each rank (srun --gpus-per-task=1)"
            )
            raise ConfigError([Problem("", problem)])


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


def device_of(topology: Topology) -> torch.device:
    """The device of this rank: its own CUDA device if there is one, else the CPU."""
    return torch.device("cuda", choose(topology, shared=True)) if torch.cuda.is_available() else torch.device("cpu")
