"""The functions by which hybrid models of transformers mix positions outside of attention: a row for each.

Their mixers call them by name, as functions of their module (5.23), which stand for a kernel of fla, mamba_ssm or
causal_conv1d where that is installed. While a model is prepared, the names of its modules lead to functions that see
whole sequences in its forwards, and to the own ones in those of every other model.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.sequence import context, states
from unishard.sequence.by_heads import over_heads, stand_in
from unishard.sequence.context import SplitBatch
from unishard.sequence.documents import numbers_of
from unishard.sequence.halo import over_halo
from unishard.sequence.head_layout import DeclaredFunction


class _Recurrence(NamedTuple):
    """How a function that computes each head by itself is laid out."""

    layout: str
    borders: str = ""
    """By which argument its kernel keeps documents apart, if it can."""
    by_states: Callable[..., Any] | None = None
    """Computes it by states, if that is known."""


_RECURRENCES = {
    "torch_chunk_gated_delta_rule": _Recurrence(
        "query: b l g d, key: b l g d, value: b l h v, g: b l h, beta: b l h -> b l h v",
        "cu_seqlens",
        states.delta_rule,
    ),
    "chunk_kimi_delta_attention": _Recurrence(
        "query: b l h d, key: b l h d, value: b l h v, g: b l h d, beta: b l h -> b l h v",
        "cu_seqlens",
        states.delta_rule,
    ),
    "mamba2_chunk_scan": _Recurrence(
        "hidden_states: b l h p, dt: b l h, A: h, B: b l g n, C: b l g n, D: h, dt_bias: h -> b l h p",
        "seq_idx",
        states.mamba2,
    ),
    "mamba_selective_scan": _Recurrence(
        "hidden_states: b h l, dt: b h l, A: h n, B: b n l, C: b n l, D: h, z: b h l, delta_bias: h -> b h l"
    ),
}
_CONVOLUTION = "causal_conv1d_fn"
_FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
"""Kernels that convolve and scan at once. Where they return None, as without them, a mixer does one after the other."""
_NAMES = {*_RECURRENCES, _CONVOLUTION, *_FUSED}
_BORDERS = ("seq_idx", "cu_seqlens")
"""Arguments by which batches keep packed documents apart."""

_logger = logging.getLogger("unishard")
_own: dict[tuple[str, str], Callable[..., Any]] = {}
"""The functions that are replaced, by module and name."""
_users: Counter[tuple[str, str]] = Counter()
"""How many prepared models have them replaced."""


def mixes_by_functions(module: nn.Module) -> bool:
    """Whether the file of a module of a model has such functions."""
    return bool(_files_of(module))


def _files_of(module: nn.Module) -> set[str]:
    """The modules of transformers with such functions that a class is of, or was before it was sharded."""
    names = {cls.__module__ for cls in type(module).__mro__ if cls.__module__.startswith("transformers.models.")}
    return {name for name in names if not _NAMES.isdisjoint(vars(sys.modules[name]))}


def use_split_functions(model: nn.Module) -> Callable[[], None]:
    """Let the mixers of transformers' models in `model` see whole sequences.

    Returns:
        What gives their modules back the functions that they had.
    """
    files = set().union(*map(_files_of, model.modules()))
    places = [(file, name) for file in files for name in _NAMES if _fits(name, vars(sys.modules[file]).get(name))]
    for place in places:
        if not _users[place]:
            _own[place] = getattr(sys.modules[place[0]], place[1])
            setattr(sys.modules[place[0]], place[1], _dispatching(place[1], _own[place]))
        _users[place] += 1

    def restore() -> None:
        for place in places:
            _users[place] -= 1
            if not _users[place]:
                setattr(sys.modules[place[0]], place[1], _own.pop(place))

    return restore


def _fits(name: str, own: Any) -> bool:
    """Whether it is the function that the table describes: another release has None there, or other arguments, and its
    models are refused by the proof.
    """
    if not callable(own) or name not in _RECURRENCES:
        return callable(own)
    arguments = re.findall(r"(\w+):", _RECURRENCES[name].layout)
    return inspect.signature(own).parameters.keys() >= {*arguments}


def _dispatching(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `own`, but in a forward of a model whose sequences are split."""
    split_function = torch.compiler.disable(_split_function(name, own))  # type: ignore[no-untyped-call]

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        if context.current is None:
            return own(*args, **kwargs)
        return split_function(context.current, *args, **kwargs)

    return run


def _split_function(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    if name in _FUSED:
        return lambda split, *args, **kwargs: None
    if name == _CONVOLUTION:
        return functools.partial(_split_convolution, own)
    recurrence = _RECURRENCES[name]
    return functools.partial(_split_recurrence, own, DeclaredFunction(own, recurrence.layout), recurrence)


def _split_convolution(
    own: Callable[..., Any], split: SplitBatch, hidden_states: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    apart, kwargs = _borders(split, kwargs, _BORDERS)

    def convolved(seen: Tensor) -> Tensor:
        made: Tensor = own(seen, weight, *args, **kwargs)
        return made

    return over_halo(convolved, hidden_states, weight.shape[-1] - 1, apart=apart)


def _split_recurrence(
    own: Callable[..., Any],
    declared: DeclaredFunction,
    recurrence: _Recurrence,
    split: SplitBatch,
    *args: Any,
    **kwargs: Any,
) -> Any:
    kernel, by_states = _is_kernel(own), recurrence.by_states
    apart, kwargs = _borders(split, kwargs, (recurrence.borders,) if kernel else _BORDERS)
    if split.proving:
        return stand_in(declared, split, args, kwargs)
    if by_states is not None and not apart and _prefers_states(declared, split, args, kwargs):
        return by_states(own, split, *args, **kwargs)
    documents = split.separate_documents if apart else split.whole_samples
    if apart and kernel and (borders := _kernel_borders(recurrence.borders, split)) is not None:
        device = next(iter(declared.tensors(args, kwargs).values())).device
        kwargs, documents = {**kwargs, recurrence.borders: borders.to(device, non_blocking=True)}, split.whole_samples
    return over_heads(declared, split, args, kwargs, documents)


def _is_kernel(own: Callable[..., Any]) -> bool:
    """Whether a function is a kernel; torch's takes no documents (transformers 5.23, integrations/hub_kernels.py)."""
    return inspect.isfunction(own) and bool(inspect.getclosurevars(own).nonlocals.get("is_new_implementation"))


def _kernel_borders(argument: str, split: SplitBatch) -> Tensor | None:
    """The documents of whole samples, as a kernel takes them; None where each must have a call of its own."""
    documents = split.separate_documents
    if argument == "seq_idx":
        return numbers_of(documents).int()
    if argument == "cu_seqlens" and len(documents) == 1:
        return torch.tensor([0, *(end for _, end in documents[0])])
    return None


def _prefers_states(
    declared: DeclaredFunction, split: SplitBatch, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a recurrence that can do both goes by states; `auto`: where it sends less, or heads do not divide."""
    if split.recurrences != "auto":
        return split.recurrences == "states"
    tensors = declared.tensors(args, kwargs)
    sizes = declared.sizes(tensors, split.part)
    if sizes["h"] % split.group.size:
        return True
    sent = sum(each.nbytes for name, each in tensors.items() if "l" in declared.arguments[name]) // split.group.size
    rows, columns = _state_sizes(sizes)
    return sizes["b"] * split.layout.runs_of_a_rank * sizes["h"] * rows * columns * torch.float32.itemsize < sent


def _state_sizes(sizes: Mapping[str, int]) -> tuple[int, int]:
    """Of a head: those of what a run sends, its state, and of a delta rule what it does to one."""
    if "n" in sizes:
        return sizes["p"], sizes["n"]
    return sizes["d"], sizes["d"] + sizes["v"]


def _borders(split: SplitBatch, kwargs: dict[str, Any], read: tuple[str, ...]) -> tuple[bool, dict[str, Any]]:
    """Whether a call keeps documents apart, and its arguments without those that say it, which are of whole samples.

    Args:
        split: The micro-batch.
        kwargs: Of the call.
        read: Arguments that count: a kernel joins what another one than its own says, in one process too.
    """
    apart = any(kwargs.get(name) is not None for name in read)
    if not apart and not split.proving and split.packed:
        _say_joined()
    return apart, {name: value for name, value in kwargs.items() if name not in _BORDERS}


@functools.cache
def _say_joined() -> None:
    if not dist.get_rank():
        _logger.warning(
            "parallel.sequence: recurrences and convolutions of this model join packed documents, as in one process, "
            "because no seq_idx or cu_seq_lens_q of the batches reaches them; most models pass on what transformers' "
            "DataCollatorWithFlattening adds with return_seq_idx=True and return_flash_attn_kwargs=True"
        )
