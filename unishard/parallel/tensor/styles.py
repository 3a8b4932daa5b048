"""What a word of a plan does to a module or to a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unishard.errors import ModelError
from unishard.parallel.tensor import embedding, linear
from unishard.parallel.tensor.cutter import Cutter
from unishard.parallel.tensor.heads import Heads


class Target(NamedTuple):
    """A module that a plan names."""

    cutter: Cutter
    heads: Heads
    name: str
    module: Any
    parent: Any


def _colwise(target: Target) -> None:
    features, _ = linear.sizes(target.name, target.module)
    rows = target.heads.divide(target.name, features)
    linear.cut_outputs(target.cutter, target.name, target.module, rows)


def _packed_colwise(target: Target) -> None:
    linear.cut_outputs(target.cutter, target.name, target.module, None, packed=2)


def _colwise_gather_output(target: Target) -> None:
    cutter, module = target.cutter, target.module
    if linear.sizes(target.name, module)[0] % cutter.groups.size == 0:  # else it stays whole, as its output is
        linear.cut_outputs(cutter, target.name, module, None)
        cutter.output(module, cutter.peers.gather)


def _rowwise(target: Target) -> None:
    linear.cut_inputs(target.cutter, target.name, target.module)


def _rowwise_split_input(target: Target) -> None:
    cutter, module = target.cutter, target.module
    if linear.sizes(target.name, module)[1] % cutter.groups.size == 0:
        linear.cut_inputs(cutter, target.name, module)
        cutter.inputs(module, cutter.peers.split)


def _embedding(cut: Callable[[Cutter, nn.Embedding], None], dim: int, target: Target) -> None:
    shape = embedding.shape_of(target.name, target.module)
    if shape[dim] % target.cutter.groups.size == 0:
        cut(target.cutter, target.module)


def _replicated_with_grad_allreduce(target: Target) -> None:
    target.cutter.count_parts(target.module)


def _all_reduce(target: Target) -> None:
    target.cutter.output(target.module, target.cutter.peers.sum)


def _moe_tp_experts(target: Target) -> None:
    target.cutter.inputs(target.module, target.cutter.peers.copy)
    target.cutter.output(target.module, target.cutter.peers.sum)


def _moe_identity_expert(target: Target) -> None:
    """Every rank adds it."""
    target.cutter.inputs(target.module, partial(torch.mul, other=1 / target.cutter.groups.size))


def _mla_kv_a_proj(target: Target) -> None:
    """Its last features go to the heads of each rank, the others through a module that is cut."""
    cutter, rope = target.cutter, getattr(target.parent, "qk_rope_head_dim", None)
    if rope is None:
        raise ModelError(
            f"parallel.tensor.plan: mla_kv_a_proj needs qk_rope_head_dim of the module with {target.name}, which is "
            f"{type(target.parent).__name__} and has none"
        )

    def change(output: Tensor) -> Tensor:
        latent, shared = output[..., :-rope], output[..., -rope:]
        return torch.cat([latent, cutter.peers.copy(shared)], -1)

    cutter.output(target.module, change)


def _nothing(target: Target) -> None:
    pass


MODULES: Mapping[str, Callable[[Target], None]] = {
    "colwise": _colwise,
    "colwise_gather_output": _colwise_gather_output,
    "colwise_rep": _colwise_gather_output,
    "packed_colwise": _packed_colwise,
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise_split_input,
    "rowwise_rep": _rowwise_split_input,
    "embedding_rowwise": partial(_embedding, embedding.cut_words, 0),
    "embedding_colwise": partial(_embedding, embedding.cut_features, 1),
    "replicated_with_grad_allreduce": _replicated_with_grad_allreduce,
    "all_reduce": _all_reduce,
    "mla_kv_a_proj": _mla_kv_a_proj,
    "moe_tp_experts": _moe_tp_experts,
    "moe_identity_expert": _moe_identity_expert,
    "local_params": _nothing,
    "replicate": _nothing,
}
"""Of a module, by the words of transformers."""


def _cut_parameter(dim: int, packed: int, cutter: Cutter, module: nn.Module, name: str) -> None:
    cutter.cut(module, name, max(dim, -module.get_parameter(name).dim()), packed)


def _added_once(cutter: Cutter, module: nn.Module, name: str) -> None:
    cutter.see(module, {name: cutter.added_once})


def _whole(cutter: Cutter, module: nn.Module, name: str) -> None:
    pass


PARAMETERS: Mapping[str, Callable[[Cutter, nn.Module, str], None]] = {
    "colwise": partial(_cut_parameter, -2, 1),
    "packed_colwise": partial(_cut_parameter, -2, 2),
    "rowwise": partial(_cut_parameter, -1, 1),
    "packed_rowwise": partial(_cut_parameter, -1, 2),
    "added_once": _added_once,
    "replicate": _whole,
}
"""Of a parameter that is named itself; `added_once` is ours: what is added before a sum over the ranks."""


def style_tied(target: Target) -> None:
    """Change a module that the plan does not name, and that shares a parameter with one that is cut.

    Raises:
        ModelError: It is neither an embedding nor a head.
    """
    kind = type(target.module).__name__
    if isinstance(target.module, nn.Embedding):
        embedding.cut_words(target.cutter, target.module)
    elif isinstance(target.module, nn.Linear):
        _colwise_gather_output(target)
    else:
        raise ModelError(
            f"parallel.tensor cuts a weight that {target.name} ({kind}) shares; leave it out of parallel.tensor.plan"
        )
