"""What is trained, and the loops of the candidates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader

import unishard
from benchmarks.peers.by_hand import adamw, deepspeed_settings, quiet
from benchmarks.peers.cell import BETAS, CLIP, DECAY, EPS, LR, Cell, Size
from benchmarks.sized_llama import llama_of

ENGINES = ("fsdp", "deepspeed")
SIZE = Size(256, 688, 4, 8, 8192, 1, 2048, 1, 1)
"""A Llama whose step on 2,048 tokens takes seconds on two cores; its length is that of a whole sequence."""
GROUP = 2
"""Ranks that share a sequence, which are all of them."""
SAMPLES = 128


class Candidate(NamedTuple):
    """One way to train."""

    name: str
    length: int = SIZE.length
    """Of a sequence."""
    sections: dict[str, Any] | None = None
    """Of the config; None for Accelerate's own."""
    hybrid: bool = False
    """Whether it trains the hybrid model."""

    @property
    def split(self) -> bool:
        """Whether the ranks share a sequence."""
        return self.sections is None or "parallel" in self.sections


def build(candidate: Candidate) -> nn.Module:
    """The same random weights on every call, in fp32."""
    size = SIZE._replace(length=candidate.length)
    return _hybrid_of(size) if candidate.hybrid else llama_of(size)


def _hybrid_of(size: Size) -> nn.Module:
    """A Qwen3.5: three layers of gated delta rules, and one of attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    dim = size.hidden // size.heads
    config = Qwen3_5TextConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        head_dim=dim,
        linear_num_key_heads=size.heads,
        linear_num_value_heads=size.heads,
        linear_key_head_dim=dim,
        linear_value_head_dim=dim,
        max_position_embeddings=size.length,
        use_cache=False,
    )
    torch.manual_seed(7)
    return Qwen3_5ForCausalLM(config).train()


def samples(length: int) -> list[dict[str, Tensor]]:
    """The data of all ranks."""
    tokens = torch.randint(0, SIZE.vocabulary, (SAMPLES, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row, "position_ids": torch.arange(length)} for row in tokens]


def through_unishard(engine_name: str, candidate: Candidate) -> Iterator[float]:
    """The loop of the README, and the loss of each update."""
    sections = candidate.sections or {}
    training = {"micro_batch_size": 1, "gradient_clipping": CLIP} | sections.get("training", {})
    cfg = unishard.Config.model_validate(
        {
            "backend": engine_name,
            "sharding": "full_shard",
            "optimizer": {"name": "adamw", "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY},
            **sections,
            "training": training,
        }
    )
    engine = unishard.prepare(build(candidate), cfg)
    read = samples(candidate.length)
    read = read if candidate.split else read[engine.rank :: GROUP]
    for batch in engine.batches(DataLoader(read, batch_size=1)):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        yield engine.mean(loss)


def accelerate_on_deepspeed(candidate: Candidate) -> Iterator[float]:
    """Accelerate's `sp_size` (Ulysses) as its documentation writes it: the script gathers and weighs the parts' losses.

    It takes CPU ranks if the process group is there before: see `benchmarks/peers/loops.py`.
    """
    with quiet():
        import deepspeed
        from accelerate import Accelerator, DeepSpeedPlugin, PartialState
        from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

        PartialState(cpu=True)
        deepspeed.init_distributed("gloo", dist_init_required=False)
        model = build(candidate)
        settings = deepspeed_settings(Cell("deepspeed", "full_shard", "fp32", "tiny"), model)
        settings |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length=candidate.length, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
        )
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
            parallelism_config=ParallelismConfig(sp_size=GROUP, sp_backend="deepspeed", sp_handler=handler),
        )
        loader = DataLoader(samples(candidate.length), batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    for batch in loader:
        labels = batch["shift_labels"]
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        part = model.module.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=SIZE.vocabulary)
        tokens = torch.stack(all_gather((labels != -100).sum()))
        loss = (torch.stack(all_gather(part)) * tokens).sum() / tokens.sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
