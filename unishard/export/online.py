"""Exports what an engine trains: each rank writes what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from unishard.checkpoint.lazy_shards import LazyShard
from unishard.errors import RankMismatchError
from unishard.export import tokenizers
from unishard.export.layout import Layout, lay_out
from unishard.export.models import assets_of
from unishard.export.ranks import ranks_of
from unishard.export.writing import Advance, write

__all__ = ["export"]


def export(
    folder: str | Path,
    module: nn.Module,
    stretches: Mapping[str, LazyShard],
    *,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    group: dist.ProcessGroup | None = None,
    advance: Advance = lambda written: None,
) -> Layout:
    """Write weights as Hugging Face lays them out. Collective.

    Args:
        folder: Empty or not there yet; the same on all ranks, on a file system that they share.
        module: The model, sharded or not; names and config are taken from it, no tensors.
        stretches: What this rank holds of each parameter and persistent buffer, by its name in the module.
        dtype: `fp32`, `bf16` or `fp16`; None for what the model's config names, else fp32.
        max_shard_size: Of one file, such as `5GB` or a number of bytes.
        tokenizer: A tokenizer or processor of transformers, or a folder that holds one; rank 0's is saved.
        group: Ranks that hold the whole model together; None for all.
        advance: Told of this rank's progress in bytes.

    Returns:
        What has been written.

    Raises:
        CheckpointError: On every rank: the model cannot be exported, an argument is wrong, or a rank cannot write. Nothing is left behind.
        RankMismatchError: On every rank: they were called with different arguments, or hold different models.
    """
    ranks = ranks_of(group)
    out = Path(folder)

    planned: list[Layout] = []

    def facts() -> tuple[str, str]:
        layout = lay_out(assets_of(module, stretches), stretches, dtype, max_shard_size)
        if ranks.rank == 0:
            layout.others.update(tokenizers.files_of(tokenizer))
        planned.append(layout)
        return str(out), layout.digest

    everyone = ranks.each(facts)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            what = f"writes to {theirs[0]}" if theirs[0] != everyone[0][0] else "plans other files"
            raise RankMismatchError(
                f"ranks export different things: rank 0 writes to {everyone[0][0]}, and rank {rank} {what}; call export on every rank with "
                "the same folder, dtype and max_shard_size"
            )
    layout = planned[0]
    write(out, stretches, layout.files, layout.others, ranks, advance)
    return layout
