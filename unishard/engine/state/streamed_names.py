"""Which tensors a stream of weights has, under which names and in which dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from unishard.checkpoint.export.layout import exported_tensors
from unishard.checkpoint.export.models import is_transformers_model
from unishard.checkpoint.export.plan import ExportedTensor
from unishard.checkpoint.export.pretrained import SavedNames, saved_names, saved_tensors
from unishard.checkpoint.export.sources import sources_of
from unishard.distributed.dtypes import DTYPES, declared_by
from unishard.distributed.lazy_shards import LazyShard, lazy_shard_of
from unishard.distributed.shards import Shard
from unishard.engine.state.merged_adapters import MergedAdapters
from unishard.errors import ContractError

Naming = Literal["saved", "model"]
"""`saved`: names and shapes of `save_pretrained`; `model`: those that the module has."""


def streamed_tensors(
    module: nn.Module,
    shards: Mapping[str, Shard],
    names: Naming,
    dtype: str | None,
    merged: MergedAdapters | None,
) -> list[ExportedTensor]:
    """The tensors of a stream, each once.

    Args:
        module: The prepared model.
        shards: Its parameters and persistent buffers, by their first names.
        names: See `Naming`; of a model that is not one of transformers these are its own in either case.
        dtype: `fp32`, `bf16` or `fp16` for floating-point tensors, but for those that the model's class keeps in fp32;
            None for fp32 parameters and for buffers as they are.
        merged: The adapters that are merged, if so: names are those of the base model then.

    Raises:
        ContractError: `save_pretrained` computes new values for a tensor.
    """
    sources = {name: source for name, source in sources_of(module).items() if source in shards}
    if merged is not None:
        sources = {own: source for name, source in sources.items() if (own := merged.name_of(name)) is not None}
    held = {name: lazy_shard_of(shard) for name, shard in shards.items()}
    held = held if merged is None else merged.shown(held)
    called = _called(merged.base if merged is not None else module, sources, held, names)
    parameters = dict(module.named_parameters())
    kept = declared_by(module, dtype) if dtype else set()

    def dtype_of(*of: str) -> torch.dtype:
        if dtype is not None:
            return DTYPES["fp32" if kept.intersection(of) else dtype]
        return torch.float32 if of[0] in parameters else held[of[0]].dtype

    return exported_tensors(called.names, called.pieces, called.joined, held, dtype_of)


def _called(model: nn.Module, sources: Mapping[str, str], held: Mapping[str, LazyShard], names: Naming) -> SavedNames:
    if names == "saved" and is_transformers_model(model):
        sources = saved_tensors(model, sources)
        saved = saved_names(model, sources, {source: held[source].shape for source in sources.values()})
        if saved.refusal is not None:
            raise ContractError(
                f"weights.stream: {saved.refusal}; or pass names='model', for names and shapes as the model has them"
            )
        return saved
    first: dict[str, str] = {}
    for name, source in sources.items():
        first.setdefault(source, name)
    return SavedNames({name: source for source, name in first.items()}, {}, {})
