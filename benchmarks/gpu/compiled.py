"""Compiles each block of a Llama with Hugging Face's defaults, key-value cache included: one graph for all blocks, and
no recompilation.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

import unishard
from benchmarks.gpu.report import Report
from benchmarks.gpu.training import BACKENDS, Curve, attempt, config, full_size, side_by_side, tokens, train
from unishard.contract.tolerances import TOLERANCES
from unishard.testing import run_ranks
from unishard.testing.models import llama

_LAYERS = 12
"""More than the 8 recompilations after which torch.compile gives up."""


class Answer(NamedTuple):
    """What torch.compile counted."""

    graphs: int
    breaks: dict[str, int]
    recompiles: tuple[str, ...]
    """Why a block was traced again, for each time."""
    compiled: Curve
    eager: Curve


def run(report: Report) -> None:
    def compare(backend: str, strategy: str) -> None:
        name = f"{backend} {strategy}"
        work = lambda: run_ranks(1, measure, backend, strategy, report.device, timeout=140)[0]  # noqa: E731
        if (answer := attempt(report, name, work)) is not None:
            judge(report, name, answer)

    side_by_side(report.device, [partial(compare, *case) for case in product(BACKENDS, ("full_shard", "no_shard"))])


def judge(report: Report, name: str, answer: Answer) -> None:
    counted = (
        f"{answer.graphs} graphs, {len(answer.recompiles)} recompilations, {sum(answer.breaks.values())} graph breaks"
    )
    one = answer.graphs == 1 and not answer.recompiles and not answer.breaks
    detail = f"{counted} for {_LAYERS} blocks" + "".join(f"\n{why}" for why in (*answer.recompiles[:1], *answer.breaks))
    report.check(
        f"{name}: one graph",
        one,
        detail,
        graphs=answer.graphs,
        recompiles=len(answer.recompiles),
        breaks=len(answer.breaks),
    )
    far = max(abs(a - b) / abs(b) for a, b in zip(answer.compiled.losses, answer.eager.losses, strict=True))
    bound = TOLERANCES["bf16"].losses
    report.check(f"{name}: trains as without compile", far <= bound, f"losses {far:.1e}, at most {bound:g}", losses=far)


def measure(backend: str, strategy: str, device: str) -> Answer:
    from torch._dynamo.utils import counters, get_compilation_metrics

    # On the CPU a backend that makes no kernels: the same tracing, and no C++ compiler.
    kernels = "inductor" if full_size(device) else "aot_eager"
    eager = once(backend, strategy, device, {})
    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()
    compiled = once(backend, strategy, device, {"compile": {"mode": "per_block", "backend": kernels}})
    reasons = [
        metrics.recompile_reason
        for metrics in get_compilation_metrics()
        if metrics.is_forward and metrics.recompile_reason
    ]
    again = tuple(reason.partition("\nUser stack trace")[0] for reason in reasons)
    breaks = {str(why): int(count) for why, count in counters["graph_break"].items()}
    return Answer(counters["stats"]["unique_graphs"], breaks, again, compiled, eager)


def once(backend: str, strategy: str, device: str, sections: dict[str, Any]) -> Curve:
    cuda = full_size(device)
    sizes = (
        {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
        if cuda
        else {}
    )
    # As LlamaConfig() has them, other than the suite's small models.
    model = llama(
        num_hidden_layers=_LAYERS, use_cache=True, attn_implementation="sdpa", max_position_embeddings=512, **sizes
    )
    with unishard.prepare(model, config(backend, strategy, **sections)) as engine:
        curve = train(engine, tokens(4, length=512 if cuda else 16))
    assert all(math.isfinite(loss) for loss in curve.losses)
    return curve
