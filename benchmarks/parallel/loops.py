"""What is trained, and the loops of the candidates: the same samples in each update, and no clipping, for which torch
mixes no DTensors with other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import unishard
from benchmarks.peers.by_hand import adamw, quiet, start_process_group
from benchmarks.peers.cell import BETAS, DECAY, EPS, LR, Size
from benchmarks.sized_llama import llama_of

WORLD = 2
SIZE = Size(256, 688, 4, 8, 8192, 1, 256, 1, 1)
"""Of a Llama and a Mixtral; a batch is the samples of one rank without the keys."""
BATCHES = 4
Loop = Iterator[Tensor]


def llama() -> nn.Module:
    """The same random weights on every call, in fp32."""
    return llama_of(SIZE)


def mixtral() -> nn.Module:
    """With 8 experts of half the Llama's inner width, of which a token has 2."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(7)
    sizes = {
        "vocab_size": SIZE.vocabulary,
        "hidden_size": SIZE.hidden,
        "intermediate_size": SIZE.inner // 2,
        "num_hidden_layers": SIZE.layers,
        "num_attention_heads": SIZE.heads,
        "num_key_value_heads": SIZE.heads,
        "num_local_experts": 8,
    }
    return MixtralForCausalLM(MixtralConfig(**sizes, max_position_embeddings=SIZE.length)).train()


def batches(reader: int, readers: int) -> Iterator[dict[str, Tensor]]:
    """Those of a rank, or of all where they read together."""
    shape = BATCHES, WORLD * SIZE.batch, SIZE.length
    tokens = torch.randint(0, SIZE.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    return cycle([{"input_ids": own, "labels": own} for own in tokens.chunk(readers, 1)[reader]])


def through_unishard(build: Callable[[], nn.Module], backend: str, parallel: Mapping[str, int]) -> Loop:
    """The loop of the README."""
    readers = WORLD // parallel.get("tensor", 1)
    cfg = unishard.Config.model_validate(
        {
            "backend": backend,
            "sharding": "full_shard",
            "parallel": parallel,
            "optimizer": {"name": "adamw", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
            "training": {"micro_batch_size": WORLD * SIZE.batch // readers},
        }
    )
    engine = unishard.prepare(build(), cfg)
    for batch in engine.batches(batches(engine.rank * readers // WORLD, readers)):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        yield loss.detach()


def through_transformers(folder: str) -> Loop:
    """`tp_plan` of transformers as its documentation writes it, and torch's optimizer, from a folder of the Llama."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    start_process_group()
    logging.disable_progress_bar()
    parts = DistributedConfig(tp_size=WORLD)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=parts, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    for batch in batches(0, 1):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def through_autotp() -> Loop:
    """DeepSpeed's AutoTP as its documentation writes it, with ZeRO-1."""
    start_process_group()
    with quiet():
        import deepspeed

        deepspeed.init_distributed("gloo", dist_init_required=False)
        model = deepspeed.tp_model_init(llama(), tp_size=WORLD, dtype=torch.float32)
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": WORLD * SIZE.batch,
            "tensor_parallel": {"autotp_size": WORLD},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 25_000_000},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)
    for batch in batches(0, 1):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        yield loss.detach()


def mean(loss: Tensor) -> float:
    """Of all ranks. Collective."""
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / WORLD
