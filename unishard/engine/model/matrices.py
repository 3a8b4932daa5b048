"""Which parameters are matrices for optimizers that know matrices, such as Muon: `optimizer.matrices: auto`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from unishard.contract.units import Unit

_NO_MATRICES = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Modules whose weights are tables, or have more dimensions than a matrix and its index."""


def find_matrices(model: nn.Module, units: Iterable[Unit]) -> frozenset[int]:
    """The identities of the parameters that are matrices.

    Those of two dimensions in repeated blocks, and those of three, such as the weights of fused experts: a matrix for
    each index of the first. A weight that is tied to an embedding is none. Outside the blocks are embeddings, first
    layers and heads, whose rows are of single words, features or classes.

    Args:
        model: Not yet sharded.
        units: Its units.
    """
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NO_MATRICES)
        for parameter in module.parameters(recurse=False)
    }
    return frozenset(
        id(parameter)
        for unit in units
        if _is_block(model, unit)
        for parameter in unit.module.parameters()
        if parameter.dim() in (2, 3) and id(parameter) not in tables
    )


def _is_block(model: nn.Module, unit: Unit) -> bool:
    """Whether a unit has layers, or is one in a list: two layers beside each other may be the first and the head."""
    parent = model.get_submodule(unit.name.rpartition(".")[0])
    return any(True for _ in unit.module.children()) or isinstance(
        parent, nn.ModuleList | nn.ModuleDict | nn.Sequential
    )
