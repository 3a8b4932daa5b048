"""What one rank does that goes its own way. Each is a run of two ranks, which gets a folder and the backend first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unishard
from dev.faults.trained import BAD, TIMEOUT, prepared
from dev.ranks.scripts import started
from dev.ranks.training import checked as config
from dev.ranks.training import my_rank, own_share, update


def misuse(folder: str, backend: str, act: Callable[..., None], strategy: str = "full_shard") -> None:
    """A run of 30 updates in which the ranks make different calls at update 13; `act` gets an engine and a batch more
    than it needs."""
    engines = [prepared(backend, strategy) for _ in range(2 if act is other_order else 1)]
    for number, batch in enumerate(own_share(30), start=1):
        if number == BAD:
            started(folder)
            act(engines, batch, folder)
        for engine in engines:
            update(engine, batch)


def mean_alone(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Logs on rank 0 only."""
    if my_rank() == 0:
        engines[0].mean(1.0)


def save_alone(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Saves on rank 0 only."""
    if my_rank() == 0:
        engines[0].save(str(Path(folder, "checkpoints")))


def barrier_alone(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Waits on rank 0 only."""
    if my_rank() == 0:
        dist.barrier()


def receive_on_both(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Waits on each rank for what the other one does not send."""
    dist.recv(torch.empty(1), 1 - my_rank())


def other_clip(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Each rank clips to a norm of its own."""
    update(engines[0], batch, clip_grad_norm=1.0 + my_rank())


def other_order(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Two engines, updated in another order on rank 1."""
    for engine in engines if my_rank() == 0 else engines[::-1]:
        update(engine, batch)


def skip_a_batch(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Trains once more on rank 0: rank 1 has skipped a batch, and leaves its loop first."""
    if my_rank() == 0:
        update(engines[0], batch)


def wait_alone(engines: Sequence[Any], batch: Any, folder: str) -> None:
    """Exports on rank 1 only."""
    if my_rank() == 1:
        engines[0].export(str(Path(folder, "exported")))


class Branches(torch.nn.Module):
    """A model whose ranks may take different branches."""

    def __init__(self, wider: bool) -> None:
        super().__init__()
        self.inp = torch.nn.Linear(13, 8)
        self.left, self.right = Expert(16), Expert(24 if wider else 16)
        self.head = torch.nn.Linear(8, 11)
        self.takes_left = True

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        """The loss."""
        hidden = self.inp(x)
        hidden = (self.left if self.takes_left else self.right)(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden), labels)


class Expert(torch.nn.Module):
    """One branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, width), torch.nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def branch(folder: str, backend: str, first: int, wider: bool) -> None:
    """Rank 1 takes the other branch from an update on."""
    ahead = {"prefetch_bucket_size": 0} if wider else {}  # else the wider branch, the last unit, is gathered once
    sharding = {"strategy": "full_shard", "units": ["Expert"]}
    model = Branches(wider)
    engine = unishard.prepare(model, config(backend, sharding, communication={"desync_timeout": TIMEOUT} | ahead))
    for number, batch in enumerate(own_share(30), start=1):
        if number == first:
            model.takes_left = my_rank() == 0
            started(folder)
        engine.backward(engine(**batch))
        engine.step()
