"""The CUDA device of a rank, and the cores that its host work may use."""

from __future__ import annotations

import logging
import os
import socket

import torch
import torch.distributed as dist

from unishard.config import Offload
from unishard.config.topology import Topology
from unishard.errors import ConfigError, Problem

__all__ = ["choose", "refuse_shared", "use_host_cores"]

_logger = logging.getLogger("unishard")


def choose(topology: Topology, *, shared: bool) -> int:
    """Index of the CUDA device on which this rank computes.

    A device that the caller has set stands; torch itself starts on 0. Else a rank that sees one device takes it, as under
    `srun --gpus-per-task=1`, and a rank that sees several takes the one with its local rank.

    Args:
        topology: The ranks.
        shared: Whether several ranks may share a device, which NCCL refuses and gloo allows.

    Raises:
        ConfigError: The node shows several devices, but fewer than it has ranks.
    """
    current, count = torch.cuda.current_device(), torch.cuda.device_count()
    if current or topology.launcher == "python":
        return current
    if topology.local_rank < count or count == 1:
        return min(topology.local_rank, count - 1)
    if shared:
        return topology.local_rank % count
    what = (
        f"this is local rank {topology.local_rank}, but the node shows {count} CUDA devices, numbered from 0, and NCCL needs one for each "
        f"rank; start at most {count} ranks on a node (torchrun --nproc-per-node={count}), show each rank a device of its own "
        '(srun --gpus-per-task=1), or to share devices in a test call torch.distributed.init_process_group("gloo") before unishard'
    )
    raise ConfigError([Problem("", what)])


def refuse_shared(index: int) -> None:
    """Check that no two ranks compute on the same device. Collective.

    Args:
        index: Of this rank's device.

    Raises:
        ConfigError: On every rank, where two of them do; NCCL would fail in its first collective.
    """
    everyone: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid)))
    for rank, device in enumerate(everyone):
        first = everyone.index(device)
        if first != rank:
            what = (
                f"ranks {first} and {rank} compute on the same CUDA device of {device[0]}, which NCCL refuses; start one rank for each "
                "device (torchrun --nproc-per-node), or show each rank a device of its own (srun --gpus-per-task=1)"
            )
            raise ConfigError([Problem("", what)])


def use_host_cores(offload: Offload, topology: Topology) -> None:
    """Let an optimizer that steps on the host use this rank's share of the cores, where torchrun has left it one thread.

    torchrun sets OMP_NUM_THREADS=1 where it is not set and starts several ranks. Only with CUDA, where nothing but the optimizer
    computes on the host: a model on the CPU keeps its threads, and with them the order of its sums.
    """
    one_thread = os.environ.get("OMP_NUM_THREADS") == "1" and dist.is_torchelastic_launched() and topology.local_world_size > 1
    if (offload.params, offload.optimizer) == ("none", "none") or not one_thread or not torch.cuda.is_available():
        return
    threads = len(os.sched_getaffinity(0)) // topology.local_world_size
    if threads > torch.get_num_threads():
        torch.set_num_threads(threads)
        _logger.info(
            "the offloaded optimizer uses %d threads a rank instead of torchrun's OMP_NUM_THREADS=1; set it to another number to choose",
            threads,
        )
