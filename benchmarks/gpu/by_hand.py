"""The same training in three ways: through unishard, and as people write it by hand for each engine. None of them waits
for the device.

All have the same model (Hugging Face, sdpa attention), data, fused AdamW, clipping, fp32 master weights, bf16 compute
and fp32 reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import unishard
from benchmarks.gpu.llamas import Size
from benchmarks.sized_llama import llama_of

Step = Callable[[], torch.Tensor]
"""One optimizer step; returns its loss, on the device."""
Loop = Callable[[Size, str, str, int], Step]
"""Size, backend, strategy, and how many steps there are at most."""

LR, CLIP, DECAY = 1e-4, 1.0, 0.01
STRATEGIES = {"fsdp": ("full_shard",), "deepspeed": ("full_shard", "shard_grad_op")}
"""Of those that have a loop by hand here."""


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def model(size: Size, on: torch.device | None = None) -> nn.Module:
    """In fp32; by default made on the device, where random numbers are fast."""
    with on or device():
        return llama_of(size, kv_heads=size.kv_heads, tied=size.tied)


def batches(size: Size, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """From pinned memory, where there is a GPU; 8 different ones."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, size.vocabulary, (8, size.batch, size.length), generator=generator)
    rows = rows.pin_memory() if torch.cuda.is_available() else rows
    return ({"input_ids": rows[turn % 8], "labels": rows[turn % 8]} for turn in range(count))


def through_unishard(size: Size, backend: str, strategy: str, count: int) -> Step:
    cfg = unishard.Config.model_validate(
        {
            "backend": backend,
            "sharding": strategy,
            "precision": "bf16",
            "training": {"micro_batch_size": size.batch, "gradient_clipping": CLIP},
            "optimizer": {"name": "adamw", "lr": LR, "weight_decay": DECAY},
        }
    )
    engine = unishard.prepare(model(size), cfg)

    def loop() -> Iterator[torch.Tensor]:
        with engine:  # until the loop is freed
            for batch in engine.batches(batches(size, count)):
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                yield loss.detach()

    return loop().__next__


def fsdp(size: Size, backend: str, strategy: str, count: int) -> Step:
    """FSDP2 as its tutorial writes it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    start_process_group()
    module, policy = model(size), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in module.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def loop() -> Iterator[torch.Tensor]:
        for batch in batches(size, count):
            batch = {name: value.to(device(), non_blocking=True) for name, value in batch.items()}
            loss = module(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    return loop().__next__


def deepspeed(size: Size, backend: str, strategy: str, count: int) -> Step:
    """`deepspeed.initialize` with a config as its documentation writes it."""
    start_process_group()
    import deepspeed as library

    # Would be compiled for minutes where there is a compiler, and only inference on the CPU calls it (DeepSpeed 0.19.8,
    # comm/torch.py).
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": {"full_shard": 3, "shard_grad_op": 2}[strategy],
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    module = model(size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    engine, *_ = library.initialize(model=module, optimizer=optimizer, config=settings, dist_init_required=False)

    def loop() -> Iterator[torch.Tensor]:
        try:
            for batch in batches(size, count):
                batch = {name: value.to(device(), non_blocking=True) for name, value in batch.items()}
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                yield loss.detach()
        finally:
            engine.destroy()

    return loop().__next__


def start_process_group() -> None:
    """As torchrun's environment says, if unishard has not done so."""
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


LOOPS: dict[str, Loop] = {"fsdp": fsdp, "deepspeed": deepspeed}
