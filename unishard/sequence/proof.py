"""Proves that attention is all in a model that mixes positions, by three small forwards.

Attention is replaced by something that leaves each position by itself. Then a few positions of every rank's part run
all together, once more with other tokens in the parts of the other ranks, and each rank's own by themselves. Where all
give the same for its own, nothing else in the model looks at another position: no convolution, recurrence, state space,
pooling, attention by own code, position counted in the forward, or loss over the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.kit.forwards import is_compiled
from unishard.distributed.nested_tensors import replace_tensors, tensors_in
from unishard.errors import ModelError
from unishard.logits.forward import whole_logits
from unishard.sequence.batches import length_of
from unishard.sequence.exchange import gather_plain
from unishard.sequence.forward import SplitForward
from unishard.sequence.group import SequenceGroup

_POSITIONS = 8
"""Of each rank's part."""
_OTHER_SHAPES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Of the largest element: what products in other shapes round, with much room; a position counted anew changes more."""
_SAME_SHAPES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.005, torch.float16: 1e-3}
"""What products in the same shapes may round, where experts get a token at another place."""
_KEPT = ("position_ids", "labels", "shift_labels", "attention_mask")
"""What is not tokens."""
_OF_POSITIONS = 3
"""Dimensions of `[batch, positions, ...]`."""
_ROUTED = 1 / 8
"""Positions that may differ in 16 bits, where another rounding sends a token to other experts. A convolution over three
positions changes twice as many."""

Run = Callable[..., Any]


class _Probe(NamedTuple):
    args: Any
    kwargs: dict[str, Any]


class _Share(NamedTuple):
    """What a rank has of the positions."""

    rank: int
    size: int
    length: int
    """How many."""


class _Runs(NamedTuple):
    """What the three forwards made of one thing."""

    whole: Any
    other: Any
    """Of all positions, with other tokens in the parts of the other ranks."""
    part: Any


def prove(model: nn.Module, run: Run, forward: SplitForward, args: Any, kwargs: dict[str, Any]) -> None:
    """Check that a model can be split, with positions of a micro-batch. Collective.

    Args:
        model: The model.
        run: Its forward, through the engine.
        forward: What splits it.
        args: Of the forward of this rank's part.
        kwargs: Likewise.

    Raises:
        ModelError: On every rank: the model mixes positions elsewhere; names the module.
    """
    group = forward.group
    part, whole = _probes(group, args, kwargs)
    share = _Share(group.rank, group.size, min(_POSITIONS, length_of(kwargs) or length_of(args) or 1))
    probes = _Runs(whole, _with_other_tokens(whole, part, group), part)
    with _quiet(model), forward.proof():
        outputs = _Runs(*(run(*probe.args, **probe.kwargs) for probe in probes))
        if _on_all(_alone(outputs, share)):
            return
        calls = []
        for probe in probes:
            with _recorded(model) as of_modules:
                run(*probe.args, **probe.kwargs)
            calls.append(of_modules)
    name = _first_named(_first_mixing(_Runs(*calls), share))
    lacking = forward.shifts_labels and "labels" in kwargs and "shift_labels" not in kwargs
    raise ModelError(_refusal(model, name, shifts=lacking))


def _probes(group: SequenceGroup, args: Any, kwargs: dict[str, Any]) -> tuple[_Probe, _Probe]:
    """A few positions of this rank's part, and those of all ranks' parts."""
    length = length_of(kwargs) or length_of(args) or 1
    count = min(_POSITIONS, length)

    def few(tensor: Tensor) -> Tensor:
        return tensor[:, :count] if tensor.dim() >= 2 and tensor.shape[1] == length else tensor

    def every(tensor: Tensor) -> Tensor:
        chosen = tensor.dim() >= 2 and tensor.shape[1] == count
        return torch.cat(gather_plain(tensor, group), 1) if chosen else tensor

    own = {key: _labelled(key, replace_tensors(value, few), group) for key, value in kwargs.items()}
    positions = own.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 2:  # a document begins in the middle of each part
        fresh = torch.arange(count - count // 2, device=positions.device, dtype=positions.dtype)
        own["position_ids"] = torch.cat([positions[:, : count // 2], fresh.expand(len(positions), -1)], 1)
        own.pop("attention_mask", None)  # under which transformers does not keep documents apart
    part = _Probe(replace_tensors(args, few), own)
    return part, _Probe(*replace_tensors(tuple(part), every))


def _with_other_tokens(whole: _Probe, part: _Probe, group: SequenceGroup) -> _Probe:
    """All positions, with the tokens of each other rank in the opposite order."""

    def changed(whole: Tensor, part: Tensor) -> Tensor:
        if whole.shape == part.shape:
            return whole
        spans = list(whole.chunk(group.size, 1))
        return torch.cat([span if rank == group.rank else span.flip(1) for rank, span in enumerate(spans)], 1)

    def replaced(whole: Any, part: Any) -> Any:
        parts = iter(list(tensors_in(part)))
        return replace_tensors(whole, lambda tensor: changed(tensor, next(parts)))

    kwargs = {key: v if key in _KEPT else replaced(v, part.kwargs[key]) for key, v in whole.kwargs.items()}
    return _Probe(replaced(whole.args, part.args), kwargs)


def _labelled(key: str, value: Any, group: SequenceGroup) -> Any:
    """Labels of which the first rank has none: a mean over a part, or a shift inside of one, makes another loss."""
    if key not in ("labels", "shift_labels") or not isinstance(value, Tensor) or value.is_floating_point():
        return value
    if value.dim() < 2:  # of whole samples
        return value
    return value.clamp(min=0) if group.rank else torch.full_like(value, -100)


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """A block without a graph, dropout, changes of buffers, compilation, and losses in chunks."""
    training = [module for module in model.modules() if module.training]
    compiled = any(map(is_compiled, model.modules()))
    for module in training:
        module.training = False
    try:
        with whole_logits(), torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            yield
    finally:
        for module in training:
            module.training = True


class _Recorded(NamedTuple):
    inputs: Any
    output: Any


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, _Recorded]]:
    """What each module takes and puts out in the block, in the order in which they end."""
    calls: dict[str, _Recorded] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] = _Recorded((args, kwargs), output)

        return hook

    hooks = [module.register_forward_hook(keep(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _first_mixing(calls: _Runs, share: _Share) -> str:
    """The first module of whose output its inputs do not say the difference; the model itself where there is none."""
    name: str
    for name in calls.part:
        if all(name in of_modules for of_modules in calls):
            outputs = _Runs(*(of_modules[name].output for of_modules in calls))
            inputs = _Runs(*(of_modules[name].inputs for of_modules in calls))
            if not _alone(outputs, share) and _alone(inputs, share):
                return name
    return ""


def _alone(runs: _Runs, share: _Share) -> bool:
    """Whether what was made of this rank's positions is the same in all runs."""
    wholes, others, parts = (list(tensors_in(made)) for made in runs)
    return len(wholes) == len(others) == len(parts) and all(
        _undisturbed(whole, other, part, share) and _holds(whole, part, share)
        for whole, other, part in zip(wholes, others, parts, strict=True)
    )


def _undisturbed(whole: Tensor, varied: Tensor, part: Tensor, share: _Share) -> bool:
    """Whether other tokens elsewhere change nothing here; of a loss they may."""
    if whole.shape != varied.shape or whole.numel() != share.size * part.numel() or not part.numel():
        return True
    return _close(_own_positions(whole, part, share), _own_positions(varied, part, share), _SAME_SHAPES)


def _holds(whole: Tensor, part: Tensor, share: _Share) -> bool:
    """Whether what all positions make has in it what this rank's make."""
    if whole.numel() == share.size * part.numel() and part.numel():
        whole = _own_positions(whole, part, share)
    return _close(whole, part, _OTHER_SHAPES)


def _close(first: Tensor, second: Tensor, room: Mapping[torch.dtype, float]) -> bool:
    if first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return bool(torch.equal(first, second))
    if not first.numel():
        return True
    atol = room.get(first.dtype, room[torch.bfloat16]) * float(first.nan_to_num(0, 0, 0).abs().max())
    differs = ~torch.isclose(first.float(), second.float(), rtol=0, atol=atol, equal_nan=True)
    if first.dim() < _OF_POSITIONS or first.dtype in (torch.float32, torch.float64):
        return not bool(differs.any())
    return float(differs.flatten(2).any(-1).float().mean()) <= _ROUTED


def _own_positions(whole: Tensor, part: Tensor, share: _Share) -> Tensor:
    longer = [dim for dim in range(part.dim()) if whole.shape[dim] == share.size * part.shape[dim]]
    if whole.dim() != part.dim() or len(longer) != 1:
        return whole
    (dim,) = longer
    if dim:
        return whole.narrow(dim, share.rank * part.shape[dim], part.shape[dim])
    count = share.length if part.shape[0] % share.length == 0 else part.shape[0]
    rows = whole.reshape(-1, share.size, count, *whole.shape[1:])
    return rows[:, share.rank].reshape(part.shape)


def _on_all(same: bool) -> bool:
    equal = torch.tensor([same], dtype=torch.int32, device=_device())
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    return bool(equal.item())


def _first_named(name: str) -> str:
    """The module that the first rank with a difference names."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name)
    return next((each for each in names if each), "")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _refusal(model: nn.Module, name: str, *, shifts: bool) -> str:
    if shifts and not name:
        return (
            f"{type(model).__name__} was called with labels and without shift_labels, so that a label at the border of "
            "each part would be lost; pass all that engine.batches yields: engine(**batch)"
        )
    module = model.get_submodule(name)
    where = f"{name} ({type(module).__name__})" if name else type(module).__name__
    return (
        f"{where} mixes positions of a sequence outside of attention, or computes a loss that is no mean over tokens, "
        "so it would train wrongly in silence under parallel.sequence; call unishard.attention where it is attention, "
        "compute the loss of its logits in the script, or remove parallel.sequence"
    )
