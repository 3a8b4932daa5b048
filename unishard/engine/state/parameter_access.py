"""Gradients and parameters by name, with the same meaning on every engine.

The adapter returns each rank's shard of a tensor; this module builds full tensors, norms and edits from shards.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.adapter import InferenceAdapter
from unishard.distributed.shards import Shard, copy_dtype, full_tensor, norm_across, shard_norms, write_shard
from unishard.engine.guards.edited_gradients import Shown
from unishard.engine.guards.inference_mode import without_inference_mode
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.phase import Phase
from unishard.engine.state.tensors import StateTensors
from unishard.errors import ContractError, ModelError, UnishardError


class ParameterAccess:
    """Reads and edits master weights. Public methods implement those of `Engine` with the same names."""

    def __init__(self, adapter: InferenceAdapter, order: CallOrder, tensors: StateTensors) -> None:
        self._adapter = adapter
        self._device = adapter.device
        self._order = order
        self._tensors = tensors

    @torch.no_grad()
    def parameter(self, name: str) -> Tensor:
        """A full copy of a master weight in fp32, or complex64 if it is complex."""
        return full_tensor(self._adapter.master_shard(self.find("parameter", name)), self._device)

    @torch.no_grad()
    def set_parameter(self, name: str, value: Tensor) -> None:
        """Replace a master weight and every copy that the engine computes with."""
        parameter = self.find("set_parameter", name)
        self._order.require("set_parameter")
        self.replace("set_parameter", name, parameter, value)

    @without_inference_mode
    @contextmanager
    def gathered(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """Edit several master weights, which are written back on exit."""
        if isinstance(names, str):
            raise ContractError(f"gathered needs a list of names, got {names!r}; write gathered([{names!r}])")
        found = {name: self.find("gathered", name) for name in names}
        self._order.require("gathered")
        full: dict[nn.Parameter, Tensor] = {}
        with torch.no_grad():
            for parameter in found.values():
                if parameter not in full:
                    full[parameter] = full_tensor(self._adapter.master_shard(parameter), self._device)
        tensors = {name: full[parameter] for name, parameter in found.items()}
        yield tensors
        self._order.require("gathered")
        if tensors.keys() != found.keys():
            raise ContractError("gathered: names were added to or removed from the dict; only edit its tensors")
        edited = {parameter: name for name, parameter in found.items() if tensors[name] is not full[parameter]}
        names_of = {parameter: name for name, parameter in found.items()} | edited
        self._order.check_now("gathered", ", writing back")
        with torch.no_grad():
            for parameter, name in names_of.items():
                self.replace("gathered", name, parameter, tensors[name])

    @torch.no_grad()
    def parameter_norms(self) -> dict[str, float]:
        """The norm of each master weight by name."""
        self._order.check_now("parameter_norms")
        return shard_norms(
            {name: self._adapter.master_shard(parameter) for name, parameter in self._tensors.each()}, self._device
        )

    def find(self, call: str, name: str) -> nn.Parameter:
        """Find a parameter by name, and check that all ranks make the same call. Collective.

        Raises:
            ContractError: There is no such parameter, or the engine is closed.
            RankMismatchError: Another rank makes another call.
        """
        parameter = self._known(call, name)
        self._order.check_now(call, f", {name}")
        return parameter

    def find_all(self, call: str, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """Find parameters by name, in the order of the model, and check that all ranks make the same call. Collective.

        Raises:
            ContractError: There is no such parameter, `names` is a single name, or the engine is closed.
            RankMismatchError: Another rank makes another call.
        """
        if isinstance(names, str):
            raise ContractError(f"{call} needs a list of names, got {names!r}; write {call}([{names!r}])")
        asked = {name: self._known(call, name) for name in names}
        found = {name: asked[name] for name in self._tensors.named if name in asked}
        all_names = ", ".join(found)
        self._order.check_sampled(
            call,
            f", {all_names}" if len(found) < 3 else f", {len(found)} parameters ({zlib.crc32(all_names.encode()):08x})",
        )
        return found

    def _known(self, call: str, name: str) -> nn.Parameter:
        self._order.require_open(call)
        named = self._tensors.named
        if name in named:
            return named[name]
        near = get_close_matches(str(name), named, 3) or [known for known in named if str(name) in known][:3]
        hint = (
            f"did you mean {' or '.join(near)}?" if near else f"the first of {len(named)} are {', '.join([*named][:3])}"
        )
        raise ContractError(f"{call}: the model has no parameter {name!r}; {hint}")

    def replace(self, call: str, name: str, parameter: nn.Parameter, value: Tensor) -> None:
        """Write rank 0's value into a master weight and into every copy of it. Collective."""
        shard = self._adapter.master_shard(parameter)
        full = from_first_rank(call, name, shard, value, self._device)
        write_shard(shard, full)
        self._order.writes += 1
        self._adapter.refresh(parameter, full)


class GradientAccess:
    """Reads and edits gradients at the end of a window.

    Public methods implement those of `Engine` with the same names.
    """

    def __init__(
        self,
        access: ParameterAccess,
        accumulation: Accumulation,
        order: CallOrder,
        tensors: StateTensors,
        shown: Shown,
    ) -> None:
        self._access = access
        self._accumulation = accumulation
        self._adapter = accumulation.adapter
        self._device = self._adapter.device
        self._order = order
        self._tensors = tensors
        self._shown = shown
        self._adapter.read_gradient = self._read

    def _read(self, parameter: nn.Parameter) -> Tensor | None:
        """What a script sees as `parameter.grad`; an edit of it is refused in the step."""
        if not (parameter.requires_grad and self._order.phase is Phase.BACKWARD_DONE and self._order.last):
            return None
        shown = self._shown
        if parameter not in shown:
            gradient = self.grad(next(name for name, each in self._tensors.each() if each is parameter))
            shown[parameter] = (gradient, 0 if gradient is None else gradient._version)
        return shown[parameter][0]

    @torch.no_grad()
    def grad(self, name: str) -> Tensor | None:
        """The gradient for the coming update: full, fp32, averaged, before clipping."""
        parameter = self._access.find("grad", name)
        divisor = self._finish("grad")
        shard = self._adapter.grad_shard(parameter, create=False) if parameter.requires_grad else None
        return None if shard is None else full_tensor(shard, self._device).div_(divisor)

    @torch.no_grad()
    def set_grad(self, name: str, value: Tensor) -> None:
        """Replace the gradient before its norm is computed and it is clipped."""
        parameter = self._access.find("set_grad", name)
        if not parameter.requires_grad:
            raise ContractError(
                f"set_grad: {name} is frozen, so no update would use its gradient; unfreeze it with "
                "engine.set_trainable"
            )
        divisor = self._finish("set_grad")
        self._shown.pop(parameter, None)
        shard = self._adapter.grad_shard(parameter, create=True)
        if shard is not None:
            write_shard(shard, from_first_rank("set_grad", name, shard, value, self._device).mul_(divisor))

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of all gradients, for the coming update."""
        self._order.require("grad_norm")
        self._order.check_sampled("grad_norm")
        divisor = self._finish("grad_norm")
        norm = self._adapter.grad_norm()
        return (norm_across(self._shards().values(), self._device) if norm is None else norm) / divisor

    @torch.no_grad()
    def grad_norms(self) -> dict[str, float]:
        """The norm of each gradient by name."""
        self._order.require("grad_norms")
        self._order.check_now("grad_norms")
        divisor = self._finish("grad_norms")
        return {name: norm / divisor for name, norm in shard_norms(self._shards(), self._device).items()}

    def _shards(self) -> dict[str, Shard]:
        """Of all gradients."""
        shards = {}
        for name, parameter in self._tensors.each():
            shard = self._adapter.grad_shard(parameter, create=False) if parameter.requires_grad else None
            if shard is not None:
                shards[name] = shard
        return shards

    def _finish(self, call: str) -> float:
        self._order.require(call)
        return self._accumulation.finish_gradients()


def from_first_rank(call: str, name: str, shard: Shard, value: Tensor, device: torch.device) -> Tensor:
    """Broadcast rank 0's value as a new full tensor in `copy_dtype`. Collective.

    Raises:
        ContractError: `value` does not have the tensor's shape, or is neither floating-point nor, for a complex
            parameter, complex.
    """
    dtype = copy_dtype(shard.values)
    if not isinstance(value, Tensor) or not (value.is_floating_point() or (value.is_complex() and dtype.is_complex)):
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ContractError(
            f"{call}: {name} needs a {'complex' if dtype.is_complex else 'floating-point'} tensor, got {kind}"
        )
    if value.shape != shard.shape:
        raise ContractError(f"{call}: {name} has the shape {tuple(shard.shape)}, got {tuple(value.shape)}")
    full = torch.empty(shard.shape, dtype=dtype, device=device).copy_(value)
    if dist.get_world_size() > 1:
        dist.broadcast(full, src=0)
    return full


# -- Weights that are read outside the forward of their modules, as full tensors with a graph ------


@contextmanager
def unsharded(
    access: ParameterAccess, adapter: InferenceAdapter, order: CallOrder, names: Iterable[str]
) -> Iterator[dict[str, nn.Parameter]]:
    """A block in which parameters are full; implements `Engine.unsharded`."""
    if order.unsharded:
        raise ContractError(
            "engine.unsharded() was entered inside engine.unsharded(); name all parameters in one block"
        )
    found = list(access.find_all("unsharded", names))
    trains = torch.is_grad_enabled() and adapter.training is not None and not order.frozen
    parameters: dict[str, nn.Parameter] = {}
    order.unsharded = order.gathered = True
    try:
        with adapter.unsharded(found):
            parameters.update((name, attrgetter(name)(adapter.module)) for name in found)
            versions = [parameter._version for parameter in parameters.values()]
            yield parameters
            if [parameter._version for parameter in parameters.values()] != versions:
                raise ContractError(
                    f"a parameter was edited inside engine.unsharded(), which holds copies: {', '.join(found[:3])}; "
                    "edit weights inside `with engine.gathered(names):`, which writes them back"
                )
            if (
                trains
                and adapter.module.training
                and (order.graph or not (order.phase is Phase.BACKWARD_DONE or order.discarded))
            ):
                raise ContractError(
                    "engine.unsharded() ended without a backward, which needs the full weights; call "
                    "engine.backward(loss) inside the block, or use torch.no_grad() around it if you only read weights"
                )
    finally:
        order.unsharded = False
        parameters.clear()  # their memory is freed: a read would end the process


def refuse_sharded_read(adapter: InferenceAdapter, error: RuntimeError) -> None:
    """Raise ModelError, which says what to write, in place of the error of an operation on a sharded weight."""
    why = explain_sharded_read(adapter, error)
    if why is not None:
        raise ModelError(why) from error


def explain_sharded_read(adapter: InferenceAdapter, error: BaseException | None) -> str | None:
    """What to write where a weight was read outside its module; None for other errors."""
    if isinstance(error, UnishardError) or not isinstance(error, RuntimeError):
        return None
    helps = adapter.reads_shard(error)
    if helps is None:
        return None
    why = str(error).partition("\n")[0]
    return (
        f"a weight is used outside the forward of its module, where a rank has only a shard of it ({why}); put the "
        "forward and the backward into a block `with engine.unsharded([name, ...]):` with the names of such weights, "
        f"or read one with engine.parameter(name), and norms with engine.parameter_norms(){helps and f'; {helps}'}"
    )
