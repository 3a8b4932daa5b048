"""The tensors of a live module by name; whether it is sharded makes no difference."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["class_of", "sources_of", "tensors_of"]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by all their names, in the order of `state_dict`, which engines hook into."""
    found: dict[str, Tensor] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        parameters = child.named_parameters(recurse=False, remove_duplicate=False)
        buffers = child.named_buffers(recurse=False, remove_duplicate=False)
        persistent = ((name, buffer) for name, buffer in buffers if name not in child._non_persistent_buffers_set)
        for name, tensor in (*parameters, *persistent):
            found[f"{path}.{name}" if path else name] = tensor
    return found


def sources_of(module: nn.Module) -> dict[str, str]:
    """For each name of a tensor the first one of the same tensor, as `named_parameters` counts."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors_of(module).items()}


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that the user gave it: `fully_shard` puts one of its own before that (torch 2.13, `FSDP` and the name)."""
    kind = type(module)
    given: type[nn.Module] = kind.__bases__[-1]
    return given if kind.__name__ == f"FSDP{given.__name__}" else kind
