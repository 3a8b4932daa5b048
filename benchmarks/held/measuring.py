"""Counts what live tensors take on two ranks, by engine, strategy, offload and precision."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch

import unishard
from dev.ranks.counting import begin, counted
from unishard.config import Config
from unishard.contract import registry
from unishard.engine.model.shape import shape_of
from unishard.testing.models import llama

RANKS = 2
ENGINES, PRECISIONS = ("fsdp", "deepspeed"), ("fp32", "bf16")
OFFLOADS: dict[str, dict[str, str]] = {
    "none": {},
    "optimizer": {"optimizer": "cpu"},
    "both": {"optimizer": "cpu", "params": "cpu"},
}
PLACES = (
    ("no_shard", "none"),
    *product(("shard_optimizer", "shard_grad_op"), ("none", "optimizer")),
    *product(("full_shard",), OFFLOADS),
)
"""Strategies, each with what it can offload."""
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_PATIENCE = 20


class Cell(NamedTuple):
    """One run."""

    engine: str
    strategy: str
    offload: str
    precision: str


class Found(NamedTuple):
    """Bytes for each parameter of the model that a rank holds between updates."""

    held: float
    """All of them, as counted."""
    device: float
    """As planned, on the device."""
    host: float
    """As planned, in host memory."""


def cells() -> Iterator[Cell]:
    """All that are measured."""
    for engine, (strategy, offload), precision in product(ENGINES, PLACES, PRECISIONS):
        yield Cell(engine, strategy, offload, precision)


def numel() -> int:
    """Parameters of the model."""
    return sum(parameter.numel() for parameter in llama(**SIZES).parameters())


def on_a_rank(chosen: tuple[Cell, ...]) -> list[Found]:
    """Train each cell for two updates."""
    return [_found(cell) for cell in chosen]


def _config(cell: Cell) -> Config:
    return Config.model_validate(
        {
            "backend": cell.engine,
            "sharding": cell.strategy,
            "precision": cell.precision,
            "offload": OFFLOADS[cell.offload],
            "optimizer": {"name": "adamw"},
            "training": {"micro_batch_size": 1, "gradient_clipping": 1.0},
            "communication": {"desync_check": False},  # its tensors are a few bytes each
        }
    )


def _found(cell: Cell) -> Found:
    cfg, topology = _config(cell), unishard.Topology.from_environment()
    begin()
    model = llama(**SIZES)
    shape = shape_of(model, cfg.sharding)
    plan = registry.get(cell.engine).footprint(shape, cfg, topology).persistent
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with unishard.prepare(model, cfg) as engine:
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        held = _settled(lambda: _bytes(engine), plan.total)
    each = sum(parameter.numel for parameter in shape.parameters)
    return Found(held / each, plan.device / each, plan.host / each)


def _bytes(engine: Any) -> int:
    return sum(counted(engine).values())


def _settled(count: Callable[[], int], expected: int) -> int:
    """A count, once a thread of gloo has released the tensors of collectives that have ended."""
    found = count()
    for _ in range(_PATIENCE):
        if found <= expected:
            break
        time.sleep(0.1)
        found = count()
    return found
