"""Parameters as the script sees them between two calls of the engine.

Stage 3 leaves an empty tensor in the place of each that is not gathered: `parameter.numel()` would be 0, and
`float(parameter.norm())`. And `parameter.grad` is elsewhere, or not reduced yet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import currentframe
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from unishard.distributed.nested_tensors import replace_tensors, tensors_in
from unishard_deepspeed.private import PRIVATE_API
from unishard_deepspeed.private.partitioned import is_partitioned

_MARK = "gathers_in_flight"
"""The attribute of parameters that show it: what to wait for where one is being gathered."""
_SCRIPT = "shown_in_script"
"""The attribute of parameters that show it: what the script sees of them now."""
_FIRST, _EVERY = 10, 40
"""Forwards in which parameters are looked at: the first ones, and every so many later ones."""
_GRAD: Any = Tensor.grad
"""torch's own attribute."""
_ENGINES = ("deepspeed", "unishard", "unishard_deepspeed")
_OF_SHAPE = frozenset({
    "__len__", "dim", "is_contiguous", "nbytes", "ndim", "ndimension", "nelement", "numel", "shape", "size",
    "storage_offset", "stride",
})  # fmt: skip
"""What a tensor on the meta device of the weight's shape tells."""
_OF_EMPTY = frozenset({
    "__format__", "_backward_hooks", "_base", "_grad", "_post_accumulate_grad_hooks", "_version", "data_ptr", "device",
    "dtype", "element_size", "get_device", "grad", "grad_fn", "is_complex", "is_cpu", "is_cuda", "is_floating_point",
    "is_inference", "is_leaf", "is_meta", "is_nested", "is_quantized", "is_shared", "is_sparse", "itemsize", "layout",
    "name", "names", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "output_nr", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad", "requires_grad_", "retain_grad", "retains_grad",
    "untyped_storage",
})  # fmt: skip
"""What the empty tensor tells as well."""
OUTSIDE = "is read outside the forward of its module"
"""In the error of a backward to a weight that was read while it was not gathered."""


class ShownParameters:
    """Changes the class of parameters while the script runs, between two calls of the engine, which itself pays for
    nothing.

    What the forward of a module reads of a weight of another one is refused, and looked for in the first forwards and
    in some later ones: there the class of parameters changes whenever DeepSpeed gathers or frees them.
    """

    def __init__(self, model: Any, read_gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Show whole weights from now on.

        Args:
            model: Given to DeepSpeed already.
            read_gradient: Returns the gradient of the coming update; None if it is not final.
        """
        own = [each for each in model.parameters() if type(each) is nn.Parameter]  # not those of others, such as bnb's
        partitions = any(map(is_partitioned, own)) and PRIVATE_API["partitioned-parameters"].works
        self._partitioned: list[Any] = own if partitions else []
        self._others: list[Any] = [] if partitions else own
        self._script = _Script(read_gradient)
        self._with_gradient = type("ParameterWithGradient", (_WithGradient,), {"script": self._script})
        self._forwards = 0
        for parameter in self._partitioned:
            setattr(parameter, _SCRIPT, self._script)
            setattr(parameter, _MARK, model.ds_inflight_param_registry)  # runtime/zero/parameter_offload.py
        self.show()

    def show(self, *, gradients: bool = False) -> None:
        """Show whole weights, and after a backward the gradients of the coming update."""
        self._script.gradients = gradients
        for parameter in self._partitioned:
            if parameter.ds_status.name != "AVAILABLE":
                parameter.__class__ = _Partitioned
            elif gradients:
                parameter.__class__ = self._with_gradient
        for parameter in self._others if gradients else ():
            parameter.__class__ = self._with_gradient

    def hide(self) -> None:
        """Show what torch and DeepSpeed compute with."""
        for parameter in self._partitioned:
            parameter.__class__ = nn.Parameter
        for parameter in self._others if self._script.gradients else ():
            parameter.__class__ = nn.Parameter
        self._script.gradients = False

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """A block in which the engine computes with the parameters."""
        self.hide()
        try:
            yield
        finally:
            self.show()

    @contextmanager
    def inside_forward(self, *, show: bool = True) -> Iterator[None]:
        """A block in which the engine runs the model.

        Args:
            show: Whether parameters are shown at its end.
        """
        looks = self._partitioned and (self._forwards < _FIRST or self._forwards % _EVERY == 0)
        self._forwards += 1
        self.hide()
        try:
            with self._following() if looks else nullcontext():
                yield
        except BaseException:
            self.show()
            raise
        if show:
            self.show()

    @contextmanager
    def _following(self) -> Iterator[None]:
        """A block in which parameters change their class with DeepSpeed (runtime/zero/partition_parameters.py)."""
        from deepspeed.runtime.zero import partition_parameters

        free: Callable[[Any], None] = partition_parameters.free_param

        def free_param(parameter: Any) -> None:
            free(parameter)
            if hasattr(parameter, _SCRIPT):
                parameter.__class__ = _InForward

        for parameter in self._partitioned:
            if parameter.ds_status.name != "AVAILABLE":
                parameter.__class__ = _InForward
        partition_parameters.free_param = free_param
        try:
            yield
        finally:
            partition_parameters.free_param = free
            for parameter in self._partitioned:
                parameter.__class__ = nn.Parameter


class _Script:
    """What the script sees of parameters now."""

    def __init__(self, read_gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        self._read_gradient = read_gradient
        self.gradients = False

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient for the script; None where the parameter's own one is right, or an engine asks."""
        frame = currentframe()
        if not self.gradients or is_of_engine(frame and frame.f_back):  # that of the attribute
            return None
        return self._read_gradient(parameter)


class _WithGradient(nn.Parameter):
    """A parameter that is whole, between a backward and a step."""

    script: _Script

    @property
    def grad(self) -> Any:
        """The gradient of the coming update for the script, and DeepSpeed's own for DeepSpeed."""
        shown = self.script.gradient(self)
        return _GRAD.__get__(self) if shown is None else shown

    @grad.setter
    def grad(self, value: Any) -> None:
        if (shown := self.script.gradient(self)) is not None:
            shown.zero_()  # tells of an edit
        _GRAD.__set__(self, value)


class _Shown:
    """What both classes of empty tensors do in torch's functions."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        of_attribute = name in ("__get__", "__set__", "__delete__")
        name = function.__self__.__name__ if of_attribute else name
        kwargs = kwargs or {}
        if of_attribute and name == "grad":
            parameter = _parameter_of(args[0])
            shown = getattr(parameter, _SCRIPT).gradient(parameter)
            if shown is not None and len(args) == 1:
                return shown
            if shown is not None:
                shown.zero_()  # tells of an edit
        elif name not in _OF_EMPTY and not is_of_engine(currentframe()) and not _show_available(args, kwargs):
            first = next(iter((*args, *kwargs.values())), None)  # torch.nn.init passes it by name
            if isinstance(first, _InForward):
                raise RuntimeError(f"a weight {OUTSIDE}")
            if name in _OF_SHAPE and isinstance(first, _Shown):
                return function(_parameter_of(first).shape_only(), *args[1:], **kwargs)
            if _writes(name, function) and (written := [*_shown_in(first)]):
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    for parameter in written:
                        parameter.zero_()  # of no element: the next forward sees that it was written
                return first
            if name in ("data", "detach"):
                return _Values.of(_parameter_of(first))
            args, kwargs = replace_tensors((args, dict(kwargs)), _in_full)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)


class _Partitioned(_Shown, nn.Parameter):
    """A parameter that is not gathered."""

    ds_shape: torch.Size

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy of what DeepSpeed has left in its place, as of a parameter that is not shown."""
        own = type(self)
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = own

    def shape_only(self) -> Tensor:
        """A tensor without values."""
        return torch.empty(self.ds_shape, dtype=self.dtype, device="meta")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter of shape {tuple(self.ds_shape)}, of which each rank has a shard"


class _InForward(_Partitioned):
    """The same while the engine runs the model."""

    @property
    def ds_status(self) -> Any:
        """DeepSpeed's own attribute."""
        return vars(self)["ds_status"]

    @ds_status.setter
    def ds_status(self, status: Any) -> None:
        vars(self)["ds_status"] = status
        if status.name == "AVAILABLE":
            self.__class__ = nn.Parameter  # type: ignore[assignment]


class _Values(_Shown, Tensor):
    """`parameter.data` and `parameter.detach()` of a parameter that is not gathered."""

    parameter: Any

    @classmethod
    def of(cls, parameter: Any) -> _Values:
        """Those of a parameter."""
        with torch._C.DisableTorchFunctionSubclass():
            values: _Values = parameter.data.as_subclass(cls)
        values.parameter = parameter
        return values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Values of a {self.parameter!r}"


class _OfShard(Function):
    """Full values, whose backward tells that they have no gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, leaf: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"a weight {OUTSIDE}, and has no gradient there")


def _show_available(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether all that is shown in arguments is gathered by now, as in `deepspeed.zero.GatheredParameters`, where
    parameters are those that torch computes with.
    """
    shown = [tensor for tensor in tensors_in((args, dict(kwargs))) if isinstance(tensor, _Shown)]
    if any(isinstance(each, _Values) or each.ds_status.name != "AVAILABLE" for each in shown):  # type: ignore[attr-defined]
        return False
    for parameter in shown:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    return True


def _parameter_of(shown: Any) -> Any:
    return shown.parameter if isinstance(shown, _Values) else shown


def _shown_in(value: Any) -> Iterator[Any]:
    """The parameters of empty tensors in a value."""
    return (_parameter_of(tensor) for tensor in tensors_in(value) if isinstance(tensor, _Shown))


def _writes(name: str, function: Any) -> bool:
    """Whether a function writes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__" and name != "__index__")
    return name.endswith("_") or getattr(function, "__name__", "") == "__set__"


def _in_full(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, _Shown):
        return tensor
    parameter, values = _parameter_of(tensor), _gathered(_parameter_of(tensor))
    if tensor is parameter and parameter.requires_grad and torch.is_grad_enabled():
        shown: Tensor = _OfShard.apply(values, torch.empty(0, requires_grad=True))  # type: ignore[no-untyped-call]
        return shown
    return values


def _gathered(parameter: Any) -> Tensor:
    """The values of a parameter, which is partitioned again; they stay for as long as they are used. Collective."""
    status, before = parameter.ds_status.name, parameter.data
    if status == "INFLIGHT":  # runtime/zero/partitioned_param_coordinator.py
        getattr(parameter, _MARK)[parameter].wait()
    elif status == "NOT_AVAILABLE":
        parameter.all_gather([parameter])
    values: Tensor = parameter.data
    if status == "NOT_AVAILABLE":
        parameter.partition([parameter])
        parameter.data = before  # whose memory tells whether the script has written the parameter
    return values


def is_of_engine(frame: FrameType | None) -> bool:
    """Whether DeepSpeed, unishard or a module's own bookkeeping calls the function that runs in a frame."""
    while frame is not None and (frame := frame.f_back) is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if package != "torch" or name == "torch.nn.modules.module":
            return package == "torch" or package in _ENGINES
    return False
