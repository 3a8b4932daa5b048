"""Gradients by name, with the same meaning on every engine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unishard.distributed.shards import Shard, full_tensor, norm_across, shard_norms, write_shard
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.call_order import CallOrder, Phase
from unishard.engine.state.parameter_access import ParameterAccess, from_first_rank
from unishard.engine.state.tensors import StateTensors
from unishard.errors import ContractError


class GradientAccess:
    """Reads and edits gradients at the end of a window.

    Public methods implement those of `Engine` with the same names.
    """

    def __init__(
        self, access: ParameterAccess, accumulation: Accumulation, order: CallOrder, tensors: StateTensors
    ) -> None:
        self._access = access
        self._accumulation = accumulation
        self._adapter = accumulation.adapter
        self._device = self._adapter.device
        self._order = order
        self._tensors = tensors
        self._adapter.read_gradient = self._read

    def _read(self, parameter: nn.Parameter) -> Tensor | None:
        """What a script sees as `parameter.grad`; an edit of it is refused in the step."""
        if not (parameter.requires_grad and self._order.phase is Phase.BACKWARD_DONE and self._order.last):
            return None
        shown = self._accumulation.shown
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
        self._accumulation.shown.pop(parameter, None)
        shard = self._adapter.grad_shard(parameter, create=True)
        if shard is not None:
            write_shard(shard, from_first_rank("set_grad", name, shard, value, self._device).mul_(divisor))

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm of all gradients, for the coming update."""
        self._order.require_end_of_window("grad_norm")
        self._order.check_sampled("grad_norm")
        divisor = self._finish("grad_norm")
        norm = self._adapter.grad_norm()
        return (norm_across(self._shards().values(), self._device) if norm is None else norm) / divisor

    @torch.no_grad()
    def grad_norms(self) -> dict[str, float]:
        """The norm of each gradient by name."""
        self._order.require_end_of_window("grad_norms")
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
        self._order.require_end_of_window(call)
        return self._accumulation.finish_gradients()
