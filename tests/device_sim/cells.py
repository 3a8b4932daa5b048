"""Runs of a few updates on two ranks, the same on the simulated device and on the CPU: what they say, and what the
device says of them."""

from __future__ import annotations

import traceback
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from harness import config, curve, own_share, share, train

import unishard
from unishard.engine.model.activation_offload import units
from unishard.testing import run_ranks
from unishard.testing.models import MODELS, llama

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
WINDOWS = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
UPDATES = 3


class Cell(NamedTuple):
    """One run."""

    backend: str
    strategy: str
    precision: str = "fp32"
    offload: str = ""
    """`optimizer`, `all`, `activations`, or nothing."""
    sequence: str = ""
    """`ulysses` or `allgather`, where both ranks share each sample."""
    replicate: str = ""
    """Parameters that every rank holds whole."""

    def __str__(self) -> str:
        return "-".join(filter(None, self))


OFFLOADS = {
    "": {},
    "optimizer": {"offload": {"optimizer": "cpu"}},
    "all": {"offload": {"params": "cpu", "optimizer": "cpu"}},
    "activations": {"offload": {"activations": "cpu"}},
}
STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
BACKENDS = ("fsdp", "deepspeed")
CELLS = (
    *(
        Cell(backend, strategy, precision)
        for backend in BACKENDS
        for strategy in STRATEGIES
        for precision in ("fp32", "bf16")
    ),
    *(
        Cell(backend, strategy, "fp32", "optimizer")
        for backend in BACKENDS
        for strategy in ("shard_grad_op", "full_shard")
    ),
    *(Cell(backend, "full_shard", "bf16", "all") for backend in BACKENDS),
    *(Cell(backend, "full_shard", "fp16") for backend in BACKENDS),
    *(Cell(backend, "full_shard", "bf16", "activations") for backend in BACKENDS),
    *(
        Cell(backend, strategy, precision, sequence=method)
        for backend in BACKENDS
        for strategy, precision in (("full_shard", "fp32"), ("shard_grad_op", "bf16"))
        for method in ("ulysses", "allgather")
    ),
    *(Cell(backend, "full_shard", "fp32", "all", "ulysses") for backend in BACKENDS),
    *(
        Cell(backend, "full_shard", precision, offload, replicate="norm|head")
        for backend in BACKENDS
        for precision, offload in (("bf16", ""), ("fp32", "all"), ("bf16", "optimizer"))
    ),
)
QUICK = (
    *(Cell(backend, "full_shard") for backend in BACKENDS),
    *(Cell(backend, "full_shard", "bf16", "activations") for backend in BACKENDS),
    Cell("fsdp", "full_shard", sequence="allgather"),
)


class Ran(NamedTuple):
    """What one rank found."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    device: str
    races: list[str]
    error: str = ""


def on_a_rank(cells: tuple[Cell, ...]) -> list[Ran]:
    """Train every cell in these processes."""
    return [_ran(cell) for cell in cells]


def races() -> list[str]:
    """What the device of this process has found so far."""
    if not torch.cuda.is_available():
        return []
    from simulated_cuda import device

    torch.cuda.synchronize()
    return list(device.races())


def _ran(cell: Cell) -> Ran:
    before = len(races())
    sections = OFFLOADS[cell.offload] | ({"parallel": {"sequence": _of(cell.sequence)}} if cell.sequence else {})
    sharding = {"strategy": cell.strategy} | ({"replicate": [cell.replicate]} if cell.replicate else {})
    cfg = config(cell.backend, sharding, precision=cell.precision, training=WINDOWS, **sections)
    try:
        with mock.patch.object(units, "SMALL", 0), unishard.prepare(_model(cell), cfg) as engine:
            found = curve(train(engine, _data(cell)))
            return Ran(found.losses, found.norms, engine.device.type, races()[before:])
    except Exception:  # it must not end the cells behind it
        return Ran((), (), "", races()[before:], traceback.format_exc())


def _of(method: str) -> dict[str, Any]:
    return {"size": 2, "method": method}


def _model(cell: Cell) -> torch.nn.Module:
    return llama(num_attention_heads=4, num_key_value_heads=2) if cell.sequence else MODELS["mlp"].build()


def _data(cell: Cell) -> list[dict[str, Any]]:
    """This rank's micro-batches; the same on both ranks where they share samples."""
    return share(2 * UPDATES, rank=0, world=1, model="llama") if cell.sequence else own_share(2 * UPDATES)


@cache
def played(cells: tuple[Cell, ...], *, cuda: bool) -> list[list[Ran]]:
    """By cell, what each rank says. All cells share their processes, which take longer to start than a cell takes."""
    ranks: list[list[Ran]] = run_ranks(2, on_a_rank, cells, timeout=120 + 30 * len(cells), env={} if cuda else ON_CPU)
    return [list(each) for each in zip(*ranks, strict=True)]


def check(cell: Cell, cells: tuple[Cell, ...]) -> Any:
    """Hold a cell of those that are played together to the CPU's."""
    there, here = (played(cells, cuda=cuda)[cells.index(cell)] for cuda in (True, False))
    for rank, (device, cpu) in enumerate(zip(there, here, strict=True)):
        assert not cpu.error, f"on the CPU, rank {rank}:\n{cpu.error}"
        assert not device.error, f"on the device, rank {rank}:\n{device.error}"
        assert (device.device, cpu.device) == ("cuda", "cpu")
        assert device.races == []
        assert len(device.losses) == UPDATES
        close = 1e-6 if cell.precision == "fp32" else 4e-4
        for field in ("losses", "norms"):
            pairs = zip(getattr(device, field), getattr(cpu, field), strict=True)
            assert max(abs(a - b) / abs(b) for a, b in pairs) <= (close if field == "losses" else 10 * close), (
                device,
                cpu,
            )
