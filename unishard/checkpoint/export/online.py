"""Exports the model of a running engine: each rank writes its own shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from unishard.checkpoint.export.destination import problem_with
from unishard.checkpoint.export.layout import ExportContents, lay_out
from unishard.checkpoint.export.models import assets_of
from unishard.checkpoint.export.tokenizers import tokenizer_files
from unishard.checkpoint.export.writing import Advance, write
from unishard.checkpoint.files import path_of
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.on_ranks import ranks_of
from unishard.errors import CheckpointError, RankMismatchError


def export(
    folder: str | Path,
    module: nn.Module,
    shards: Mapping[str, LazyShard],
    *,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    overwrite: bool = False,
    group: dist.ProcessGroup | None = None,
    advance: Advance = lambda written: None,
) -> ExportContents:
    """Write weights in the Hugging Face layout. Collective.

    Args:
        folder: Empty or nonexistent, unless `overwrite` is set; the same on all ranks, on a shared file system.
        module: The model, sharded or not; only its names and config are used.
        shards: This rank's shard of each parameter and persistent buffer, by its name in the module.
        dtype: `fp32`, `bf16` or `fp16`; None for the dtype in the model's config, else fp32.
        max_shard_size: Maximum size of a file, such as `5GB` or a number of bytes.
        tokenizer: A transformers tokenizer or processor, or a folder with one; rank 0's is saved.
        overwrite: Whether to replace an earlier export there. Only rank 0's is used.
        group: Ranks that together hold the full model; None for all ranks.
        advance: Called with this rank's progress in bytes.

    Returns:
        What was written.

    Raises:
        CheckpointError: On every rank: the model cannot be exported, an argument is invalid, the folder is not free, or
            a rank cannot write. Nothing is left behind.
        RankMismatchError: On every rank: the ranks passed different arguments, or have different models.
    """
    ranks = ranks_of(group)
    out = path_of(folder, "export")

    planned: list[ExportContents] = []

    def facts() -> tuple[str, str]:
        layout = lay_out(assets_of(module, shards), shards, dtype, max_shard_size)
        if ranks.rank == 0:
            layout.others.update(tokenizer_files(tokenizer))
        planned.append(layout)
        return str(out), layout.digest

    everyone = ranks.each(facts)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            action = f"writes to {theirs[0]}" if theirs[0] != everyone[0][0] else "plans other files"
            raise RankMismatchError(
                f"ranks export different things: rank 0 writes to {everyone[0][0]}, and rank {rank} {action}; call "
                "export on every rank with the same folder, dtype and max_shard_size"
            )
    layout = planned[0]
    taken = ranks.each(lambda: problem_with(out, overwrite=overwrite) if ranks.rank == 0 else None)[0]
    if taken is not None:
        raise CheckpointError(taken)
    write(out, shards, layout.files, layout.others, ranks, advance, overwrite=overwrite)
    return layout
