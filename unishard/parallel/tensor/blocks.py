"""The blocks of a model, each of which is cut at its entrance and whole again at its exit, such as an attention."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed.nested_tensors import tensors_in

_OPENS = ("colwise", "packed_colwise", "mla_kv_a_proj")
_CLOSES = ("rowwise", "packed_rowwise", "all_reduce", "moe_tp_experts")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CutBlock:
    """A block before it was cut, without data, and what it is called with."""

    def __init__(
        self, name: str, module: nn.Module, styles: Mapping[str, str], stand_ins: Mapping[int, Tensor]
    ) -> None:
        """Copy a block.

        Args:
            name: Of the block.
            module: Not cut yet.
            styles: Of what is in it.
            stand_ins: Tensors without data by the ids of those of the model.
        """
        self.name, self.module, self.styles = name, module, styles
        self.proved = False
        """Whether its output is."""
        self._whole = copy.deepcopy(module, dict(stand_ins))
        self._call: Any = None
        for each in self._whole.modules():
            for hooks in _HOOKS:
                vars(each)[hooks].clear()
        self._handle = module.register_forward_pre_hook(self._keep, with_kwargs=True)

    @property
    def was_called(self) -> bool:
        """Whether it is known what it is called with."""
        return self._call is not None

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        found = next(tensors_in(self._call), None)
        return next(self.module.parameters()).device if found is None else found.device

    @property
    def elements(self) -> int:
        """Of its parameters."""
        return sum(map(Tensor.numel, self._whole.parameters()))

    def close(self) -> None:
        """Keep nothing any more."""
        self._handle.remove()

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._handle.remove()
        with torch.inference_mode(mode=False), torch.no_grad():
            kept = {id(each): each.clone().requires_grad_(each.requires_grad) for each in tensors_in((args, kwargs))}
            self._call = _copied((args, kwargs), kept)

    def call(self, dtype: torch.dtype) -> tuple[list[Tensor], Any]:
        """What it was called with in another dtype: tensors to take gradients of, and the arguments, made of them."""
        own = {
            id(each): each.detach().to(dtype).requires_grad_(each.requires_grad)
            for each in tensors_in(self._call)
            if each.is_floating_point()
        }
        made = _copied(self._call, {key: each.clone() for key, each in own.items()})
        return [each for each in own.values() if each.requires_grad], made

    def made(self, dtype: torch.dtype) -> nn.Module:
        """The whole block with random weights, the same on every rank, in evaluation mode."""
        device = self.device
        generator = torch.Generator(device).manual_seed(0)
        live = dict(self.module.named_buffers(remove_duplicate=False))
        tensors = {
            id(each): live[name].detach().clone()
            for name, each in self._whole.named_buffers(remove_duplicate=False)
            if name in live
        }
        for each in self._whole.parameters():
            values = _weights(each.shape, dtype if each.is_floating_point() else each.dtype, device, generator)
            tensors[id(each)] = nn.Parameter(values, requires_grad=each.requires_grad)
        return copy.deepcopy(self._whole, tensors).eval()


def blocks_of(
    model: nn.Module, modules: Mapping[str, nn.Module], styles: Mapping[str, str], without: set[nn.Module]
) -> list[CutBlock]:
    """One block of each kind: those of a kind have the same class and styles.

    Args:
        model: Not cut yet.
        modules: Its modules by name.
        styles: Of what will be cut.
        without: Modules that no block may contain.
    """
    tensors = (*model.parameters(), *model.buffers())
    stand_ins = {id(each): _without_data(each) for each in tensors}
    kinds, found = set(), []
    for name in dict.fromkeys(_around(modules, styles)):
        inside = _inside(name, styles)
        module = modules[name]
        start = len(name) + 1 if name else 0
        kind = type(module), frozenset((each[start:], style) for each, style in inside.items())
        if kind in kinds or without.intersection(module.modules()):
            continue
        kinds.add(kind)
        try:
            found.append(CutBlock(name, module, inside, stand_ins))
        except Exception:  # of a foreign class, which cannot be copied
            continue
    return found


def _around(modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> Iterator[str]:
    """The lowest modules with a forward around what makes results whole again, and something that is cut before it."""
    for name, style in styles.items():
        if style not in _CLOSES:
            continue
        for at in _upwards(name):
            module = modules.get(at)
            if module is None or type(module).forward is nn.Module.forward:
                continue
            if any(each != at and _inside(at, {each: ""}) for each, style in styles.items() if style in _OPENS):
                yield at
                break


def _upwards(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _inside(name: str, styles: Mapping[str, str]) -> dict[str, str]:
    return {each: style for each, style in styles.items() if not name or each == name or each.startswith(f"{name}.")}


def _copied(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    try:
        return copy.deepcopy(value, dict(tensors))
    except Exception:
        return None


def _without_data(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _weights(shape: torch.Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Values that make heads and features differ much more than those that a training begins with."""
    values = torch.empty(shape, dtype=torch.float32 if dtype.is_floating_point else dtype, device=device)
    if not dtype.is_floating_point:
        return values.zero_()
    if len(shape) < 2:
        return values.uniform_(0.5, 1, generator=generator).to(dtype)
    values.normal_(std=1 / math.sqrt(shape[-1]), generator=generator)
    return values.mul_(torch.linspace(0.5, 1.5, shape[-2], device=device).unsqueeze(-1)).to(dtype)
