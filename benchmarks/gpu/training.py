"""What several pieces share: configs, tokens, and a short training through unishard."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import nn

import unishard
from benchmarks.gpu.report import Report
from dev.pages.marked import SIMULATED
from unishard.config import Config
from unishard.testing import RankFailure
from unishard.testing.models import llama

BACKENDS = ("fsdp", "deepspeed")


def full_size(device: str) -> bool:
    """Whether a piece takes the sizes of a GPU: the simulated one (`make device-sim`) gets those of the CPU form."""
    return device == "cuda" and not (torch.cuda.is_available() and SIMULATED in torch.cuda.get_device_name(0))


class Curve(NamedTuple):
    """Loss and gradient norm of each optimizer step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


def config(backend: str, strategy: str, precision: str = "bf16", accumulation: int = 1, **sections: Any) -> Config:
    """AdamW with clipping, as a user would write it."""
    plain = {
        "backend": backend,
        "sharding": strategy,
        "precision": precision,
        "training": {"micro_batch_size": 2, "gradient_accumulation_steps": accumulation, "gradient_clipping": 1.0},
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }
    return Config.model_validate(plain | sections)


def tokens(
    count: int, *, batch: int = 2, length: int = 32, vocabulary: int = 97, seed: int = 5
) -> list[dict[str, torch.Tensor]]:
    """Random micro-batches, the same on every call."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, vocabulary, (count, batch, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def wide_llama(hidden: int, layers: int, **changes: Any) -> nn.Module:
    """A Llama whose transfers take a moment on a GPU; eager attention, whose backward gives the same bits each time."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    return llama(**sizes, num_key_value_heads=4, max_position_embeddings=128, **changes)


def train(engine: unishard.Engine, data: Sequence[Any], before_step: Callable[[], None] = lambda: None) -> Curve:
    """The README's loop. Collective."""
    losses, norms, window = [], [], []
    for batch in engine.batches(data):
        loss = engine(**batch).loss
        engine.backward(loss)
        window.append(engine.mean(loss))
        before_step()
        step = engine.step()
        if step.updated:
            losses.append(sum(window) / len(window))
            norms.append(float(step.grad_norm))
            window = []
    return Curve(tuple(losses), tuple(norms))


def side_by_side(device: str, calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls: at once on a GPU, where each mostly waits for a process to start, else one after the other."""
    wanted = list(calls)
    with ThreadPoolExecutor(len(wanted) if full_size(device) else 1) as pool:
        for each in [pool.submit(call) for call in wanted]:
            each.result()


def attempt(report: Report, name: str, call: Callable[[], Any]) -> Any:
    """The result of a call, or None after recording its failure, so that one engine's failure does not stop the other's
    checks.
    """
    try:
        return call()
    except RankFailure as failure:
        report.check(name, False, str(failure))
    except Exception:
        report.check(name, False, traceback.format_exc())
    return None
