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
from unishard.testing.features import FEATURES
from unishard.testing.features.eight_bit import BOUNDS, wide
from unishard.testing.features.quantization import quantized_by_bitsandbytes, with_adapters
from unishard.testing.models import MODELS, llama

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
WINDOWS = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
UPDATES = 3
MUON = {"name": "muon", "lr": 0.01, "adamw_lr": 3e-3, "weight_decay": 0.1}
PARTS = 2
"""Backward calls for each micro-batch of the feature `parts`."""


class Cell(NamedTuple):
    """One run."""

    backend: str
    strategy: str
    precision: str = "fp32"
    offload: str = ""
    """`optimizer`, `all`, `activations`, `files`, `state_files`, or nothing."""
    sequence: str = ""
    """A feature in which both ranks share each sample."""
    feature: str = ""
    """What else is trained with, of `SECTIONS`, or nothing."""

    def __str__(self) -> str:
        return "-".join(filter(None, self))


OFFLOADS = {
    "": {},
    "optimizer": {"offload": {"optimizer": "cpu"}},
    "all": {"offload": {"params": "cpu", "optimizer": "cpu"}},
    "activations": {"offload": {"activations": "cpu"}},
    "files": {"offload": {"params": "nvme", "optimizer": "nvme", "nvme_path": "."}},
    "state_files": {"offload": {"optimizer": "nvme", "nvme_path": "."}},
}
SECTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "muon": {"optimizer": MUON},
    "nf4": {"optimizer": {"name": "adamw", "lr": 1e-2}},
    "stream": {"optimizer": {"name": "adamw", "lr": 1e-2}},
    "parts": {"training": {"backward_calls": PARTS}},
    "replicate": {"sharding": {"replicate": ["norm|head"]}},
    "eight_bit": {"optimizer": {"name": "adamw_8bit", "lr": 1e-2}},
    "experts": FEATURES["experts"].sections,
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
    *(
        Cell(backend, "full_shard", precision, offload)
        for backend in BACKENDS
        for precision, offload in (("bf16", "files"), ("fp32", "state_files"))
    ),
    *(Cell(backend, "full_shard", "fp16") for backend in BACKENDS),
    *(Cell(backend, "full_shard", "bf16", "activations") for backend in BACKENDS),
    *(
        Cell(backend, strategy, precision, sequence=method)
        for backend in BACKENDS
        for strategy, precision in (("full_shard", "fp32"), ("shard_grad_op", "bf16"))
        for method in ("ulysses", "allgather")
    ),
    *(
        Cell(backend, strategy, precision, sequence=f"recurrences_by_{way}")
        for backend in BACKENDS
        for way, strategy, precision in (("heads", "full_shard", "bf16"), ("states", "shard_grad_op", "fp32"))
    ),
    *(Cell(backend, "full_shard", "fp32", "all", "ulysses") for backend in BACKENDS),
    *(
        Cell(backend, strategy, precision, sequence="tensor")
        for backend in BACKENDS
        for strategy, precision in (("full_shard", "bf16"), ("shard_grad_op", "fp32"))
    ),
    *(Cell(backend, strategy, "fp32", feature="muon") for backend in BACKENDS for strategy in STRATEGIES),
    *(
        Cell(backend, "full_shard", precision, offload, feature="muon")
        for backend in BACKENDS
        for precision, offload in (("bf16", ""), ("fp32", "optimizer"), ("bf16", "all"))
    ),
    *(
        Cell(backend, strategy, precision, offload, feature=feature)
        for backend in BACKENDS
        for feature, strategy, precision, offload in (
            ("nf4", "shard_grad_op", "fp32", ""),
            ("nf4", "full_shard", "bf16", ""),
            ("nf4", "full_shard", "fp32", "all"),
            ("stream", "no_shard", "fp32", ""),
            ("stream", "shard_grad_op", "bf16", ""),
            ("stream", "full_shard", "fp32", ""),
            ("stream", "full_shard", "bf16", "all"),
            ("parts", "no_shard", "fp32", ""),
            ("parts", "shard_grad_op", "bf16", ""),
            ("parts", "full_shard", "fp32", ""),
            ("parts", "full_shard", "bf16", "activations"),
            ("replicate", "full_shard", "bf16", ""),
            ("replicate", "full_shard", "fp32", "all"),
            ("replicate", "full_shard", "bf16", "optimizer"),
            ("eight_bit", "shard_grad_op", "fp32", ""),
            ("eight_bit", "full_shard", "bf16", ""),
            ("eight_bit", "full_shard", "fp32", "optimizer"),
            ("eight_bit", "full_shard", "bf16", "state_files"),
            ("experts", "shard_grad_op", "fp32", ""),
            ("experts", "full_shard", "fp32", ""),
            ("experts", "full_shard", "bf16", ""),
        )
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
    streamed: tuple[float, ...] = ()
    """Of the feature `stream`: sums over each tensor."""


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
    sections = OFFLOADS[cell.offload] | SECTIONS[cell.feature]
    if cell.sequence:
        sections["parallel"] = FEATURES[cell.sequence].sections["parallel"]
    training = WINDOWS | sections.pop("training", {})
    sharding = {"strategy": cell.strategy} | sections.pop("sharding", {})
    cfg = config(cell.backend, sharding, precision=cell.precision, training=training, **sections)
    try:
        with mock.patch.object(units, "SMALL", 0), unishard.prepare(_model(cell), cfg) as engine:
            streamed: list[torch.Tensor] = []
            done = _LOOPS.get(cell.feature, train)(engine, _data(cell), *[streamed] * (cell.feature == "stream"))
            found = curve(done)
            sums = tuple(torch.stack(streamed).tolist()) if streamed else ()
            return Ran(found.losses, found.norms, engine.device.type, races()[before:], streamed=sums)
    except Exception:  # it must not end the cells behind it
        return Ran((), (), "", races()[before:], traceback.format_exc())


def _train_and_stream(engine: Any, data: list[dict[str, Any]], sums: list[torch.Tensor]) -> list[tuple[float, Any]]:
    """Reads all weights between updates, which nothing on the host waits for, with adapters and merged into them."""
    done = []
    for micro_batch in engine.batches(data):
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        done.append((engine.mean(loss), engine.step()))
        if done[-1][1].updated:
            for merged in (False, True):
                stream = engine.weights.stream(merged=merged, bucket_bytes=4096)
                sums += [tensor.float().square().sum() for _, tensor in stream]
    return done


def _train_in_parts(engine: Any, data: list[dict[str, Any]]) -> list[tuple[float, Any]]:
    """Sends back the halves of each micro-batch one by one."""
    done = []
    for micro_batch in engine.batches(data):
        halves = [
            dict(zip(micro_batch, each, strict=True))
            for each in zip(*(values.chunk(PARTS) for values in micro_batch.values()), strict=True)
        ]
        total = 0.0
        for half in halves:
            loss = engine(**half).loss / PARTS
            engine.backward(loss)
            total += engine.mean(loss)
        done.append((total, engine.step()))
    return done


_LOOPS: dict[str, Any] = {"stream": _train_and_stream, "parts": _train_in_parts}


def _model(cell: Cell) -> torch.nn.Module:
    if cell.feature in ("nf4", "eight_bit"):
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            import bitsandbytes  # noqa: F401  # without its CUDA kernels, which the device does not run
    if cell.feature == "nf4":
        return with_adapters(quantized_by_bitsandbytes(llama(intermediate_size=42), "nf4", double=True))
    if cell.feature == "stream":
        return with_adapters(llama())
    if cell.feature == "eight_bit":
        return wide()
    if cell.sequence in ("ulysses", "allgather"):
        return llama(num_attention_heads=4, num_key_value_heads=2)
    if feature := FEATURES.get(cell.sequence or ("experts" if cell.feature == "experts" else "")):
        (model,) = feature.models.values()
        return model.build()
    return MODELS["mlp"].build()


def _data(cell: Cell) -> list[dict[str, Any]]:
    """This rank's micro-batches; the same on both ranks where they share samples."""
    if cell.sequence:
        return share(2 * UPDATES, rank=0, world=1, model="llama")
    return own_share(2 * UPDATES, "llama" if cell.feature in ("nf4", "stream", "experts") else "mlp")


@cache
def played(cells: tuple[Cell, ...], *, cuda: bool) -> list[list[Ran]]:
    """By cell, what each rank says. All cells share their processes, which take longer to start than a cell takes."""
    ranks: list[list[Ran]] = run_ranks(2, on_a_rank, cells, timeout=300 + 60 * len(cells), env={} if cuda else ON_CPU)
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
        if cell.precision == "bf16" and cell.feature in ("nf4", "stream"):
            close = 2e-3  # before any update the norms of a Llama differ by that much: kernels round elsewhere
        if cell.feature == "eight_bit":
            close = BOUNDS[cell.precision].losses  # a difference of 1e-7 flips a code of 8 bits
        for field in ("losses", "norms", "streamed"):
            pairs = zip(getattr(device, field), getattr(cpu, field), strict=True)
            worst = max((abs(a - b) / abs(b) for a, b in pairs), default=0)
            assert worst <= (close if field == "losses" else 10 * close), (device, cpu)
        assert bool(device.streamed) is (cell.feature == "stream")
