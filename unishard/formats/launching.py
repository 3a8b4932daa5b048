"""How a config or a launch line wants its processes started, and the torchrun line that does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Launch"]


@dataclass(frozen=True, slots=True)
class Launch:
    """What a document says about its processes. None where it is silent; text where it holds a placeholder."""

    nodes: Any = None
    processes: Any = None
    """On each node."""
    node_rank: Any = None
    address: Any = None
    """Of the node with rank 0."""
    port: Any = None
    rendezvous: Any = None
    """Torchrun's rendezvous backend, where it is not `static`."""
    devices: Any = None
    """Indices of the GPUs, with commas between them."""
    hosts: Any = None
    """A hostfile, with the filter on it."""
    max_restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks."""

    def torchrun(self) -> str:
        """The line to type on each node; empty where the document says nothing about its processes."""
        if self == Launch(rendezvous=self.rendezvous, max_restarts=self.max_restarts, environment=self.environment):
            return ""
        several = self.nodes not in (None, 1, "1")
        words = [f"CUDA_VISIBLE_DEVICES={self.devices}"] if self.devices is not None else []
        words += ["torchrun", *([f"--nnodes {self.nodes}"] if several else [])]
        words.append(f"--nproc-per-node {'gpu' if self.processes is None else self.processes}")
        words += self._meeting(several=several)
        words += [f"--max-restarts {self.max_restarts}"] if self.max_restarts else []
        where = f"  # once on each host of {self.hosts}" if self.hosts else ""
        return " ".join((*words, "train.py")) + where

    def _meeting(self, *, several: bool) -> list[str]:
        """Where the processes of several nodes meet."""
        if self.rendezvous is not None and several:
            end = f" --rdzv-endpoint {self.address or 'HOST'}:{self.port or 29500}"
            return [f"--rdzv-backend {self.rendezvous}{end} --rdzv-id 1"]
        rank = f"--node-rank {'RANK' if self.node_rank is None else self.node_rank}" if several else ""
        address = f"--master-addr {self.address or 'HOST'}" if several else ""
        return list(filter(None, (rank, address, f"--master-port {self.port}" if self.port not in (None, 0) else "")))
