"""Computes many times with a module that its hooks see called once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from unishard.contract.kit.input_casts import outputs_in_fp32

Compute = Callable[[Tensor], Tensor]


def in_use(head: nn.Module) -> Any:
    """The module to which a head passes its calls, where it is peft's wrapper of a module and the copies that train."""
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return head
    wrapper: Any = head
    trains = wrapper.active_adapters and not wrapper.disable_adapters
    return copies[wrapper.active_adapters[0]] if trains else wrapper.original_module


def hooked_inside(module: nn.Module) -> list[nn.Module]:
    """The modules inside one whose calls something watches, as DeepSpeed does at stage 3 to gather each."""
    return [part for part in module.modules() if part is not module and _is_hooked(part)]


def _is_hooked(module: nn.Module) -> bool:
    own = next(module.parameters(recurse=False), None) is not None
    return own and bool(module._forward_pre_hooks or module._forward_hooks)


def in_one_call(modules: Sequence[nn.Module], compute: Compute, value: Tensor) -> Tensor:
    """What `compute` makes of a tensor, inside one call of each of some modules.

    Args:
        modules: Each is called with the tensor, inside the call of the one before.
        compute: Runs inside all of them.
        value: What their hooks may change.
    """
    if not modules:
        return compute(value)
    first, *rest = modules
    with _replaced_forward(first, partial(in_one_call, rest, compute)), outputs_in_fp32():
        result: Tensor = first(value)
    return result


@contextmanager
def _replaced_forward(module: nn.Module, forward: Compute) -> Iterator[None]:
    attributes = vars(module)
    own = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        if own is not None:
            attributes["forward"] = own


@contextmanager
def without_hooks(module: nn.Module, forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """A block in which a module calls some of those inside it without their hooks.

    Args:
        module: Itself called without hooks.
        forwards: The forward of each of them.
    """
    with ExitStack() as replaced:
        for parent in module.modules() if forwards else ():
            for name, child in list(parent.named_children()):
                if child in forwards:
                    parent.register_module(name, _Unhooked(child, forwards[child]))
                    replaced.callback(parent.register_module, name, child)
        yield


class _Unhooked(nn.Module):
    """A module without its hooks."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        vars(self).update(module=module, forward=forward)  # not as a child

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["module"], name)
