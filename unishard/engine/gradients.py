"""`engine.gradients`: the gradients of the coming update by name, with the same meaning on every engine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unishard.distributed.shards import Shard, full_tensor, norm_across, shard_norms, write_shard
from unishard.engine.entering import entered
from unishard.engine.guards.edited_gradients import Shown
from unishard.engine.loop.accumulation import Accumulation
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.optim.loss_scale import LossScale
from unishard.engine.place import Phase
from unishard.engine.state.named_parameters import NamedParameters, from_first_rank
from unishard.engine.state.tensors import StateTensors
from unishard.engine.training_only import require_training
from unishard.errors import ContractError


@entered
class Gradients:
    """Reads and replaces the gradients of the coming update; `engine.gradients`.

    Every method is collective, and is called between the backward of a window's last micro-batch and `step`. Gradients
    are averaged over window and ranks, and not yet clipped, unless by `clip`. On an engine that was prepared with
    `train=False` each raises `ContractError`.
    """

    def __init__(
        self,
        order: CallOrder,
        parameters: NamedParameters,
        tensors: StateTensors,
        accumulation: Accumulation | None,
        shown: Shown,
        inference_scale: LossScale,
    ) -> None:
        """Called by `unishard.prepare`."""
        self._order = order
        self._parameters = parameters
        self._tensors = tensors
        self._accumulation = accumulation
        self._shown = shown
        self._inference_scale = inference_scale
        if accumulation is not None:
            accumulation.updates.read_gradient = self._show

    @torch.no_grad()
    def read(self, name: str) -> Tensor | None:
        """Read a gradient. Collective.

        Args:
            name: Name in `module.named_parameters()`; a tied parameter has one gradient under all its names.

        Returns:
            A full fp32 copy on `engine.device`; None for a frozen parameter and for one that no rank used.

        Raises:
            ContractError: There is no such parameter, or the window is not at its end.
        """
        training = self._training("gradients.read")
        parameter = self._parameters.find("gradients.read", name)
        divisor = self._finish("gradients.read", training)
        shard = training.updates.grad_shard(parameter, create=False) if parameter.requires_grad else None
        return None if shard is None else full_tensor(shard, training.updates.model.device).div_(divisor)

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Replace a gradient, before the norm is computed and the gradients are clipped. Collective.

        Args:
            name: Name in `module.named_parameters()`, of a trainable parameter.
            value: Full, in the units of `read`, any floating dtype and device. Rank 0's is used; every rank passes one.

        Raises:
            ContractError: As in `read`; or the parameter is frozen, or `value` does not fit it.
        """
        call = "gradients.write"
        training = self._training(call)
        parameter = self._parameters.find(call, name)
        if not parameter.requires_grad:
            raise ContractError(
                f"{call}: {name} is frozen, so no update would use its gradient; unfreeze it with "
                "engine.weights.set_trainable"
            )
        divisor = self._finish(call, training)
        self._shown.pop(parameter, None)
        shard = training.updates.grad_shard(parameter, create=True)
        if shard is not None:
            write_shard(shard, from_first_rank(call, name, shard, value, training.updates.model.device).mul_(divisor))

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """L2 norm of each gradient that `read` reads; the norm of these norms is `Step.grad_norm`. Collective.

        One all-reduce of one number per parameter; nothing is gathered.

        Returns:
            As of `Weights.norms`; parameters without a gradient are omitted.

        Raises:
            ContractError: The window is not at its end.
        """
        training = self._training("gradients.norms")
        self._order.require("gradients.norms")
        self._order.ranks.check_now("gradients.norms")
        divisor = self._finish("gradients.norms", training)
        norms = shard_norms(self._shards(training), training.updates.model.device)
        return {name: norm / divisor for name, norm in norms.items()}

    @torch.no_grad()
    def norm(self) -> Tensor:
        """The norm that `step` will return as `grad_norm`, before the step, which uses it again if its engine can.

        Collective.

        Returns:
            A 0-d fp32 tensor on `engine.device`, the same on every rank; FSDP2 does not wait for it.

        Raises:
            ContractError: The window is not at its end.
        """
        training = self._training("gradients.norm")
        self._order.require("gradients.norm")
        self._order.ranks.check_sampled("gradients.norm")
        divisor = self._finish("gradients.norm", training)
        norm = training.updates.grad_norm()
        if norm is None:
            norm = norm_across(self._shards(training).values(), training.updates.model.device)
        return norm / divisor

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients now, so that what looks at them before the step sees them clipped. Collective.

        The step then clips them no more.

        Args:
            max_norm: The maximum L2 norm of all gradients together.

        Returns:
            The norm before, as `norm` returns it and the step will.

        Raises:
            ContractError: The window is not at its end.
        """
        norm, training = self.norm(), self._training("gradients.clip")
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for shard in self._shards(training).values():
            shard.values.mul_(factor.to(shard.values.device))
        self._shown.clear()
        training.norm_before_clipping = norm
        return norm

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in backward, by which gradients are divided after it; 1.0 except in fp16."""
        scale = self._inference_scale if self._accumulation is None else self._accumulation.loss_scale
        return scale.value

    def _show(self, parameter: nn.Parameter) -> Tensor | None:
        """What a script sees as `parameter.grad`; an edit of it is refused in the step."""
        if not (parameter.requires_grad and self._order.place.phase is Phase.BACKWARD_DONE and self._order.place.last):
            return None
        shown = self._shown
        if parameter not in shown:
            gradient = self.read(next(name for name, each in self._tensors.each() if each is parameter))
            shown[parameter] = (gradient, 0 if gradient is None else gradient._version)
        return shown[parameter][0]

    def _shards(self, training: Accumulation) -> dict[str, Shard]:
        """Of all gradients."""
        shards = {}
        for name, parameter in self._tensors.each():
            shard = training.updates.grad_shard(parameter, create=False) if parameter.requires_grad else None
            if shard is not None:
                shards[name] = shard
        return shards

    def _finish(self, call: str, training: Accumulation) -> float:
        """Finish the gradients; the divisor that the update will use."""
        self._order.require(call)
        return training.finish_gradients()

    def _training(self, call: str) -> Accumulation:
        return require_training(self._accumulation, self._order, call)
