"""Changes of a model that can be undone: parameters are cut, forwards get something around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from unishard.distributed.slices import slice_of
from unishard.errors import ModelError
from unishard.parallel.collectives import scale_gradient, seen_as
from unishard.parallel.cutting import cut
from unishard.parallel.groups import Groups
from unishard.parallel.tensor.peers import Peers

Forward = Callable[..., Any]
Change = Callable[[Tensor], Tensor]
_QUANTIZED_BYTES = 1


def require_plain(name: str, parameter: Tensor) -> None:
    """Check that a weight is not quantized.

    Raises:
        ModelError: It is.
    """
    if not parameter.is_floating_point() or parameter.element_size() <= _QUANTIZED_BYTES:
        raise ModelError(f"parallel.tensor cannot cut quantized weights, such as {name}; load the model in bf16")


class Cutter:
    """Of one model."""

    def __init__(self, modules: Mapping[str, nn.Module], groups: Groups) -> None:
        self._names = {module: name for name, module in modules.items()}
        self.groups, self.peers = groups, Peers(groups)
        self.factor = 1.0
        """What the gradients of slices are multiplied by."""
        self.full, self.put = ExitStack(), ExitStack()
        """What undoes cuts, and the rest."""
        self.slices: dict[nn.Module, set[str]] = {}
        """Parameters that are slices, by the module that uses them."""
        self._changes: dict[nn.Module, dict[str, Change]] = {}

    def cut(self, module: nn.Module, name: str, dim: int, packed: int = 1) -> None:
        """Keep this rank's part of a parameter; a tied one is cut once.

        Raises:
            ModelError: It has no equal parts, is quantized, or is cut in another way already.
        """
        parameter = module.get_parameter(name)
        groups, where = self.groups, f"{self._names[module]}.{name}"
        part = groups.part(dim % parameter.dim(), packed)
        if (before := slice_of(parameter)) is None:
            require_plain(where, parameter)
            if parameter.shape[dim] % (groups.size * packed):
                raise ModelError(
                    f"parallel.tensor is {groups.size}, which does not divide the {parameter.shape[dim] // packed} "
                    f"features of {where}; choose a size that does, or leave it out of parallel.tensor.plan"
                )
            self.full.callback(cut(parameter, part))
        elif before != part:
            raise ModelError(f"parallel.tensor cuts {where} in two ways, as it is tied; correct parallel.tensor.plan")
        self.slices.setdefault(module, set()).add(name)
        self.see(module, {})

    def see(self, module: nn.Module, changes: dict[str, Change]) -> None:
        """Let a forward find changed tensors in the place of parameters; slices are counted by `factor`."""
        if module not in self._changes:
            self._changes[module] = {}
            self.around(module, lambda forward: partial(self._seeing, module, forward))
        self._changes[module].update(changes)

    def count_parts(self, module: nn.Module) -> None:
        """Say that a module has whole parameters, of whose gradients each rank has a part."""
        self.see(module, {name: self.part_of_gradient for name, _ in module.named_parameters(recurse=False)})

    def uses_whole(self, module: nn.Module) -> bool:
        """Whether a module has whole parameters of which nothing was said."""
        own = [*module.parameters(recurse=False)]
        return bool(own) and module not in self._changes and not any(map(slice_of, own))

    def part_of_gradient(self, parameter: Tensor) -> Tensor:
        """A whole parameter, of whose gradient each rank has a part: the mean over ranks is then their sum."""
        return scale_gradient(parameter, self.groups.size)

    def added_once(self, parameter: Tensor) -> Tensor:
        """A whole parameter that is added before a sum over the ranks: one of them adds it."""
        return self.part_of_gradient(parameter) * float(self.groups.number == 0)

    def _seeing(self, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        changes = self._changes[module]
        if self.factor != 1:
            changes = dict.fromkeys(self.slices.get(module, ()), partial(scale_gradient, factor=self.factor)) | changes
        if not changes:
            return forward(*args, **kwargs)
        with seen_as(module, changes):
            return forward(*args, **kwargs)

    def around(self, module: nn.Module, changed: Callable[[Forward], Forward]) -> None:
        """Put something around the forward of a module."""
        self.set(module, "forward", changed(module.forward))

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of a module."""
        own = vars(module)
        if name in own:
            self.put.callback(own.__setitem__, name, own[name])
        else:
            self.put.callback(own.pop, name, None)
        own[name] = value

    def close(self) -> None:
        """Undo everything that was not let go."""
        self.full.close()
        self.put.close()

    def inputs(self, module: nn.Module, change: Change) -> None:
        """Change the floating-point tensors that a module is called with."""
        self.around(module, lambda forward: partial(_with_inputs, forward, change))

    def output(self, module: nn.Module, change: Change) -> None:
        """Change what a module returns."""
        self.around(module, lambda forward: partial(_with_output, forward, change))


def _with_inputs(forward: Forward, change: Change, *args: Any, **kwargs: Any) -> Any:
    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    return forward(*map(changed, args), **{name: changed(value) for name, value in kwargs.items()})


def _with_output(forward: Forward, change: Change, *args: Any, **kwargs: Any) -> Any:
    return change(forward(*args, **kwargs))
