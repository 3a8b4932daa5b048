"""FSDP2 and DeepSpeed as a user writes them who knows them well and does not use unishard.

Each loop is a generator that gives the mean loss of this rank's micro-batches after each optimizer step. They follow
the tutorials, with what the strategy means (docs/sharding.md) set where the engine's default is another:
DeepSpeed's stage 3 would keep up to 1e9 parameters from forward to backward, and replicate small ones; its reduction
would allocate buckets of 5e8 elements whatever the model's size. Where micro-batches are accumulated under
`shard_grad_op`, FSDP2 keeps gathered parameters until the last one. The units of FSDP2 are those of torchtitan's Llama:
the embedding, each layer, and norm and head together, which are not resharded after forward.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.cell import BETAS, CLIP, DECAY, EPS, LR, Cell

_BUCKET = 25_000_000
"""Elements: what DDP's 25 MiB, FSDP's units and unishard's default come near to."""


def start_process_group() -> None:
    """As torchrun's environment says, if no other loop has done so."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Fused, as everywhere here."""
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)


def fsdp(cell: Cell) -> Iterator[Tensor]:
    """FSDP2 as torch's tutorial writes it, with the units of torchtitan (0.2, models/llama3/infra/parallelize.py,
    `apply_fsdp`).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    start_process_group()
    model, accumulation = cell.build(), cell.size.accumulation
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if cell.precision == "bf16"
        else MixedPrecisionPolicy()
    )
    once = cell.strategy == "shard_grad_op"
    for unit in (model.model.embed_tokens, *model.model.layers):
        fully_shard(unit, mp_policy=policy, reshard_after_forward=not once)
    fully_shard([model.model.norm, model.lm_head], mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy)
    optimizer = adamw(model)
    batches = cell.micro_batches(dist.get_rank())
    while True:
        losses = []
        for turn in range(accumulation):
            if once:
                model.set_reshard_after_backward(turn == accumulation - 1)
            loss = model(**next(batches)).loss
            (loss / accumulation).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        yield torch.stack(losses).mean()


def deepspeed(cell: Cell) -> Iterator[Tensor]:
    """`deepspeed.initialize` with a JSON, and the loop of its documentation."""
    start_process_group()
    with quiet():
        import deepspeed as library

        model = cell.build()
        settings = deepspeed_settings(cell, model)
        engine, *_ = library.initialize(model=model, optimizer=adamw(model), config=settings, dist_init_required=False)
    batches = cell.micro_batches(dist.get_rank())
    while True:
        losses = []
        for _ in range(cell.size.accumulation):
            loss = engine(**next(batches)).loss
            engine.backward(loss)  # divides by the accumulation
            engine.step()
            losses.append(loss.detach())
        yield torch.stack(losses).mean()


def deepspeed_settings(cell: Cell, model: nn.Module) -> dict[str, Any]:
    """The JSON, for the loop by hand and for Accelerate's."""
    size, numel = cell.size, sum(parameter.numel() for parameter in model.parameters())
    zero: dict[str, Any] = {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": min(_BUCKET, numel),
    }
    if cell.strategy == "full_shard":
        unit = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
        zero |= {
            "stage": 3,
            "leaf_module": {"classes": ["LlamaDecoderLayer"]},
            "stage3_max_live_parameters": 2 * unit,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": unit,
        }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size.batch,
        "gradient_accumulation_steps": size.accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if cell.precision == "bf16":
        settings |= {
            "bf16": {"enabled": True},
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
        }
    return settings


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what DeepSpeed prints, and without compiling an op that only inference on the CPU calls (DeepSpeed
    0.19.8, comm/torch.py).
    """
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed as library

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        yield
