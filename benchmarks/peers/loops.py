"""The loops of a cell, by who wrote them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import unishard
from benchmarks.peers import by_hand
from benchmarks.peers.by_hand import adamw, deepspeed_settings, quiet
from benchmarks.peers.cell import BETAS, CLIP, DECAY, EPS, LR, Batch, Cell

# -- The same training through Accelerate, on FSDP2 and on DeepSpeed, written as its documentation says --
# Accelerate 1.15 starts neither engine on CPU ranks by itself. What is forced, for both engines and nothing else:
#
# - `PartialState(cpu=True)` is made before the `Accelerator`, so that the ranks communicate through gloo on the CPU.
# DeepSpeed needs no more: an `Accelerator` that is not asked for the CPU itself takes the plugin (state.py,
# AcceleratorState.__init__). - For FSDP2, its public attribute `distributed_type` is then set from MULTI_CPU to
# MULTI_GPU, because `AcceleratorState`   looks at an FSDP plugin only for the types of accelerators (same place). The
# type becomes FSDP there, as on GPUs; the   device stays the CPU.
#
# In bf16, `mixed_precision="bf16"` is what its users write: on FSDP2 Accelerate then also runs the forward under
# autocast. The policy says that gradients are reduced in fp32, as in the other loops; Accelerate's own choice would be
# bf16. On FSDP2, `Accelerator.accumulate` reduces the gradients of the last micro-batch only, which sends less than the
# strategy means and holds full gradients until then.


def accelerate_fsdp(cell: Cell) -> Iterator[Tensor]:
    """With `FullyShardedDataParallelPlugin(fsdp_version=2)`."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import MixedPrecisionPolicy

    half = cell.precision == "bf16"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=cell.strategy == "full_shard",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if half
        else None,
    )
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    model = cell.build()
    accelerator = Accelerator(
        mixed_precision=cell.precision if half else "no",
        gradient_accumulation_steps=cell.size.accumulation,
        fsdp_plugin=plugin,
    )
    model, optimizer = accelerator.prepare(model, adamw(model))
    yield from accelerate_train(cell, accelerator, model, optimizer)


def accelerate_deepspeed(cell: Cell) -> Iterator[Tensor]:
    """With a `DeepSpeedPlugin` that has the JSON of the loop by hand."""
    with quiet():
        from accelerate import Accelerator, DeepSpeedPlugin, PartialState
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        PartialState(cpu=True)
        model = cell.build()
        plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_settings(cell, model))
        accelerator = Accelerator(gradient_accumulation_steps=cell.size.accumulation, deepspeed_plugin=plugin)
        model, optimizer = accelerator.prepare(model, adamw(model))
        unset_hf_deepspeed_config()  # it would count for the models of the other loops of this process, too
    yield from accelerate_train(cell, accelerator, model, optimizer)


def accelerate_train(cell: Cell, accelerator: Any, model: nn.Module, optimizer: Any) -> Iterator[Tensor]:
    """Accelerate's loop, the same for both engines."""
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    batches = cell.micro_batches(dist.get_rank())
    while True:
        losses = []
        for _ in range(cell.size.accumulation):
            with accelerator.accumulate(model):
                loss = model(**next(batches)).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        yield torch.stack(losses).mean()


# -- The same training through unishard: one loop for both engines ---------------------------------


class Loader:
    """A loader that says its length, as most do. Without one, unishard compares the ranks' numbers of batches before
    each window.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[Batch]:
        return self._batches


def config(cell: Cell, **sections: Any) -> unishard.Config:
    """The config of a cell, with more sections; everything that it leaves out has unishard's default."""
    size = cell.size
    return unishard.Config.model_validate(
        {
            "backend": cell.engine,
            "sharding": cell.strategy,
            "precision": cell.precision,
            "training": {
                "micro_batch_size": size.batch,
                "gradient_accumulation_steps": size.accumulation,
                "gradient_clipping": CLIP,
            },
            "optimizer": {"name": "adamw", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
            **sections,
        }
    )


def train(cell: Cell, **sections: Any) -> Iterator[Tensor]:
    """The loop of the README, with more sections of the config."""
    engine = unishard.prepare(cell.build(), config(cell, **sections))
    losses = []
    for batch in engine.batches(Loader(cell.micro_batches(engine.rank))):
        loss = engine(**batch).loss
        engine.backward(loss)
        losses.append(loss.detach())
        if engine.step().ended:
            yield torch.stack(losses).mean()
            losses = []


Loop = Callable[[Cell], Iterator[Tensor]]
"""Its first `next` prepares everything and makes the first optimizer step."""

_LOOPS: dict[tuple[str, str], Loop] = {
    ("by hand", "fsdp"): by_hand.fsdp,
    ("by hand", "deepspeed"): by_hand.deepspeed,
    ("Accelerate", "fsdp"): accelerate_fsdp,
    ("Accelerate", "deepspeed"): accelerate_deepspeed,
    ("unishard", "fsdp"): train,
    ("unishard", "deepspeed"): train,
}


def loop_of(candidate: str, cell: Cell) -> Iterator[Tensor]:
    """A candidate's loop, not started."""
    return _LOOPS[candidate, cell.engine](cell)
