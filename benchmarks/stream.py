"""Time, collectives and memory of `engine.weights.stream`, beside a gather of one parameter after the other.

    python -m benchmarks.stream                        # both engines, about 110 million parameters, 2 ranks
    python -m benchmarks.stream --hidden 256 --rounds 1 --bucket 4

Both sides read the same live model under `full_shard` in bf16, in the same processes, and take turns; printed are
medians. By hand that is `DTensor.full_tensor` on FSDP2 and `deepspeed.zero.GatheredParameters` on DeepSpeed. Memory is
the highest resident size of the worst rank above what it was before the call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import unishard
from benchmarks.checkpoint import Measured, config, in_turns, measured, sizes
from unishard.testing import run_ranks
from unishard.testing.models import llama

_MIB = 1 << 20


class Side(NamedTuple):
    """One way to read all weights."""

    seconds: float
    collectives: int
    peak: float
    """Bytes."""


class _Collectives(TorchDispatchMode):
    """Counts them as torch dispatches them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += function.namespace in ("c10d", "_c10d_functional") and "wait" not in function.name()
        return function(*args, **kwargs or {})


def by_hand(module: nn.Module) -> Iterator[Tensor]:
    """Each parameter in full and in bf16."""
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            yield parameter.full_tensor().bfloat16()
        else:
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                yield parameter.data.to(torch.bfloat16, copy=True)


def measure(backend: str, hidden: int, layers: int, rounds: int, bucket: int) -> dict[str, Side]:
    """Both ways. Collective."""
    with unishard.prepare(llama(**sizes(hidden, layers)), config(backend, "full_shard")) as engine:
        sides: dict[str, Callable[[], Iterator[Any]]] = {
            "unishard": lambda: engine.weights.stream(dtype="bf16", bucket_bytes=bucket * _MIB),
            "by hand": lambda: by_hand(engine.module),
        }
        counts = {name: collectives_of(read) for name, read in sides.items()}
        turns = in_turns(rounds, *(lambda read=read: measured(lambda: consume(read())) for read in sides.values()))
    return {
        name: Side(median(turn, "seconds"), counts[name], median(turn, "peak"))
        for name, turn in zip(sides, turns, strict=True)
    }


def consume(tensors: Iterator[Any]) -> None:
    """Look at each and let go of it, as a sender does."""
    for _ in tensors:
        pass


def collectives_of(read: Callable[[], Iterator[Any]]) -> int:
    with _Collectives() as counted:
        consume(read())
    return counted.count


def median(turns: list[Measured], field: str) -> float:
    return sorted(getattr(turn, field) for turn in turns)[len(turns) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket", type=int, default=64, help="MiB")
    asked = parser.parse_args()
    print(f"{'engine':10} {'':9} {'seconds':>8} {'collectives':>12} {'MiB above':>10}")
    for backend in ("fsdp", "deepspeed"):
        given = (backend, asked.hidden, asked.layers, asked.rounds, asked.bucket)
        for name, side in run_ranks(asked.ranks, measure, *given, timeout=3600)[0].items():
            print(f"{backend:10} {name:9} {side.seconds:8.2f} {side.collectives:12} {side.peak / _MIB:10.0f}")


if __name__ == "__main__":
    main()
