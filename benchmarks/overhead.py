"""What a step through unishard costs beyond the same loop written by hand on the same engine.

    python benchmarks/overhead.py                      # both engines, tiny and medium model, 2 ranks
    python benchmarks/overhead.py --backend deepspeed --model tiny --pairs 300 --json overhead.json
    python benchmarks/overhead.py --desync             # the same loop with and without communication.desync_check

Both loops live in the same processes and the same process group, and take turns: the ratio of two neighbouring steps is
free of what else the machine is doing. Printed is the median of these ratios with its 95 % interval (order statistics,
no distribution assumed). The engine itself is built the same way on both sides; only the loop around it differs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import unishard
from benchmarks.ratios import paired
from unishard.distributed.devices import device_of
from unishard.engine.model.units import find_units
from unishard.engine.optim.optimizers import factory
from unishard.engine.resolve import resolve
from unishard.failures.lifetime import ensure
from unishard.testing import run_ranks
from unishard.testing.models import llama

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"sizes": {}, "batch": 2, "length": 16},
    "medium": {
        "sizes": {
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
        },
        "batch": 2,
        "length": 128,
    },
}
PAIRS = {"tiny": 300, "medium": 120}
STRATEGIES = ("no_shard", "full_shard")
CLIP = 1.0
WARM_UP = 5

Update = Callable[[], float]
"""One update; returns its gradient norm."""


class Result(NamedTuple):
    """One line of the table."""

    backend: str
    strategy: str
    model: str
    parameters: int
    by_hand_ms: float
    unishard_ms: float
    overhead_percent: float
    low_percent: float
    high_percent: float
    pairs: int


def build(model: str) -> nn.Module:
    sizes = {"max_position_embeddings": 256} | MODELS[model]["sizes"]
    return llama(**sizes)


def batches(model: str, count: int) -> list[dict[str, torch.Tensor]]:
    shape = MODELS[model]
    vocabulary = shape["sizes"].get("vocab_size", 97)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, vocabulary, (8, shape["batch"], shape["length"]), generator=generator)
    return [{"input_ids": tokens[index % 8], "labels": tokens[index % 8]} for index in range(count)]


# -- through unishard ------------------------------------------------------------------------------


def through_unishard(model: str, cfg: unishard.Config, count: int) -> Update:
    engine = unishard.prepare(build(model), cfg)

    def loop() -> Iterator[float]:
        for batch in engine.batches(batches(model, count * cfg.training.gradient_accumulation_steps)):
            loss = engine(**batch).loss
            engine.backward(loss)
            step = engine.step()
            if step.updated:
                yield step.grad_norm

    return loop().__next__


# -- by hand ---------------------------------------------------------------------------------------


def rate(cfg: unishard.Config) -> Callable[[int], float]:
    """As transformers' `get_cosine_schedule_with_warmup`."""
    warm, total = cfg.scheduler.warmup_steps, cfg.scheduler.total_steps
    return lambda step: step / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


def torch_by_hand(model: str, cfg: unishard.Config, count: int) -> Update:
    from torch.distributed.tensor import DTensor

    from unishard_fsdp import options
    from unishard_fsdp.sharding import applying

    module, topology = build(model), ensure(unishard.Topology.from_environment())
    device, native = device_of(topology), options.parse(unishard.translate(cfg, topology=topology).native)
    if isinstance(native, options.FullyShard):
        applying.apply_fully_shard(module, find_units(module, cfg.sharding), device, native)
        running = module
    else:
        running = nn.parallel.DistributedDataParallel(
            module.to(device), bucket_cap_mb=native.bucket_cap_mb, gradient_as_bucket_view=True
        )
    parameters = list(module.parameters())
    optimizer = factory(cfg.optimizer, module)(module.named_parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate(cfg))
    accumulation = cfg.training.gradient_accumulation_steps

    def loop() -> Iterator[float]:
        for index, batch in enumerate(batches(model, count * accumulation)):
            batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
            last = index % accumulation == accumulation - 1
            if running is not module:
                running.require_backward_grad_sync = last
            loss = running(**batch).loss
            (loss / accumulation).backward()
            if last:
                norm = nn.utils.clip_grad_norm_(parameters, CLIP)
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                yield norm.item()

    return loop().__next__


def deepspeed_by_hand(model: str, cfg: unishard.Config, count: int) -> Update:
    from unishard_deepspeed import start
    from unishard_deepspeed.private.stage_3 import reduce_units_by_parameter

    module, topology = build(model), ensure(unishard.Topology.from_environment())
    device, deepspeed = device_of(topology), start.load(topology)
    plan = resolve(module, cfg, topology, None, None, train=True)
    settings = {**plan.engine.native, "gradient_clipping": CLIP}
    optimizer = factory(cfg.optimizer, module)(module.to(device).named_parameters())
    with start.quiet():
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)
    if cfg.sharding.strategy == "full_shard":
        reduce_units_by_parameter(
            engine.optimizer, list(module.parameters())
        )  # else the engines would differ, not only the loops
    groups, factor = engine.optimizer.param_groups, rate(cfg)
    accumulation = cfg.training.gradient_accumulation_steps

    def loop() -> Iterator[float]:
        updates = 0
        for index, batch in enumerate(batches(model, count * accumulation)):
            batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
            if index % accumulation == 0:
                for group in groups:
                    group["lr"] = cfg.optimizer.lr * factor(updates)
            loss = engine(**batch).loss
            engine.backward(loss / accumulation, scale_wrt_gas=False)
            if index % accumulation == accumulation - 1:
                engine.step()
                updates += 1
                norm = engine.get_global_grad_norm()  # None at stage 0 in fp32, which clips without keeping it
                yield math.nan if norm is None else float(norm)

    return loop().__next__


BY_HAND = {"fsdp": torch_by_hand, "deepspeed": deepspeed_by_hand}


# -- both, in turns --------------------------------------------------------------------------------


def timed(update: Update) -> float:
    """Milliseconds of one update, from a common start to the end of the slowest rank's."""
    dist.barrier()
    start = time.perf_counter()
    update()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item() * 1e3


def config(backend: str, strategy: str, model: str, accumulation: int) -> unishard.Config:
    return unishard.Config.model_validate(
        {
            "backend": backend,
            "sharding": strategy,
            "training": {
                "micro_batch_size": MODELS[model]["batch"],
                "gradient_accumulation_steps": accumulation,
                "gradient_clipping": CLIP,
            },
            "scheduler": {"name": "cosine", "warmup_steps": 3, "total_steps": 10_000},
        }
    )


def unchecked(model: str, cfg: unishard.Config, count: int) -> Update:
    """Through unishard as well, without the check of the ranks' calls."""
    communication = cfg.communication.model_copy(update={"desync_check": False})
    return through_unishard(model, cfg.model_copy(update={"communication": communication}), count)


def measure(
    backend: str, strategy: str, model: str, pairs: int, accumulation: int, desync: bool = False
) -> tuple[list[tuple[float, float]], int]:
    """(by hand, through unishard) milliseconds of each pair, and the number of parameters; with `desync` (unchecked,
    checked).
    """
    ensure(unishard.Topology.from_environment())
    cfg = config(backend, strategy, model, accumulation)
    ours = through_unishard(model, cfg, pairs + WARM_UP)
    theirs = (unchecked if desync else BY_HAND[backend])(model, cfg, pairs + WARM_UP)
    for _ in range(WARM_UP):
        norm, expected = ours(), theirs()
        if math.isfinite(expected) and abs(norm - expected) > 1e-4 * expected:
            raise RuntimeError(
                f"the two loops do not train the same: gradient norm {norm} through unishard, {expected} by hand"
            )
    measured = []
    for pair in range(pairs):
        if pair % 2:
            own = timed(ours)
            measured.append((timed(theirs), own))
        else:
            hand = timed(theirs)
            measured.append((hand, timed(ours)))
    return measured, sum(parameter.numel() for parameter in build(model).parameters())


def summary(backend: str, strategy: str, model: str, measured: list[tuple[float, float]], parameters: int) -> Result:
    hand, own = zip(*measured, strict=True)
    found = paired(own, hand)
    return Result(
        backend,
        strategy,
        model,
        parameters,
        statistics.median(hand),
        statistics.median(own),
        *((found[name] - 1) * 100 for name in ("ratio", "low", "high")),
        found["pairs"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=BY_HAND, action="append", help="default: both")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append", help="default: no_shard and full_shard")
    parser.add_argument("--model", choices=MODELS, action="append", help="default: tiny and medium")
    parser.add_argument("--pairs", type=int, help="pairs of steps; default: 300 for tiny, 120 for medium")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument(
        "--desync", action="store_true", help="compare with unishard without communication.desync_check instead"
    )
    parser.add_argument("--json", help="also write the results to this file")
    given = parser.parse_args()
    results = []
    other = "unchecked" if given.desync else "by hand"
    print(
        f"{'backend':10} {'strategy':11} {'model':7} {'parameters':>11} {other:>10} {'unishard':>10} {'overhead':>9}  "
        "95 % interval"
    )
    for backend in given.backend or BY_HAND:
        for strategy in given.strategy or STRATEGIES:
            for model in given.model or MODELS:
                pairs = given.pairs or PAIRS[model]
                asked = (backend, strategy, model, pairs, given.accumulation, given.desync)
                measured, parameters = run_ranks(given.world, measure, *asked, timeout=600)[0]
                result = summary(backend, strategy, model, measured, parameters)
                results.append(result)
                print(
                    f"{backend:10} {strategy:11} {model:7} {parameters:11,} {result.by_hand_ms:7.2f} ms "
                    f"{result.unishard_ms:7.2f} ms "
                    f"{result.overhead_percent:+8.2f}%  {result.low_percent:+.2f}% .. {result.high_percent:+.2f}%",
                    flush=True,
                )
    if given.json:
        with open(given.json, "w") as file:
            json.dump([result._asdict() for result in results], file, indent=2)


if __name__ == "__main__":
    main()
