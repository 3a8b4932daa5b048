"""The tensors of a live module by name, sharded or not."""

from __future__ import annotations

from torch import Tensor, nn

from unishard.contract.private_api import CORE_PRIVATE_API

_PATCH = CORE_PRIVATE_API["buffers-in-files"]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by all their names, in the order of `state_dict`, which engines hook into."""
    tensors: dict[str, Tensor] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        parameters = child.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in (*parameters, *persistent_buffers(child, recurse=False).items()):
            tensors[f"{path}.{name}" if path else name] = tensor
    return tensors


def persistent_buffers(module: nn.Module, *, recurse: bool = True) -> dict[str, Tensor]:
    """Buffers that a state dict has, by all their names.

    Does not call `state_dict`, because hooks of engines and of the user move, rename and leave out tensors in it.

    Raises:
        BackendError: There are buffers, and this torch does not say which of them are persistent.
    """
    named = dict(module.named_buffers(recurse=recurse, remove_duplicate=False))
    if named:
        _PATCH.require()
    return {name: buffer for name, buffer in named.items() if _is_persistent(module, name)}


def _is_persistent(module: nn.Module, name: str) -> bool:
    owner, _, buffer = name.rpartition(".")
    return buffer not in module.get_submodule(owner)._non_persistent_buffers_set


def sources_of(module: nn.Module) -> dict[str, str]:
    """Maps each name of a tensor to its first name, the one that `named_parameters` yields."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors_of(module).items()}
