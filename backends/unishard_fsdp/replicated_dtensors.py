"""Step an optimizer on DTensors in place of whole parameters, beside the DTensors that are parameters themselves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from unishard_fsdp.stepped_shards import SteppedShards


class ReplicatedDTensors(SteppedShards):
    """The parameters themselves where they are DTensors, and of whole ones DTensors that every rank has in full.

    For an optimizer that is not known to be element-wise: torch has no operation on lists of both kinds (torch 2.13).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: Mapping[nn.Parameter, Tensor], mesh: DeviceMesh
    ) -> None:
        """Make DTensors of the memory of whole parameters, or of their master weights."""
        self._mesh = mesh
        super().__init__(optimizer, masters)
        self._whole = {parameter: tensor for parameter, tensor in self.tensors.items() if tensor is not parameter}

    def _new(self, parameter: nn.Parameter) -> nn.Parameter:
        if isinstance(parameter, DTensor):
            return parameter
        return nn.Parameter(self._replicated(self._weights(parameter).detach()))

    def _moved(self, value: Tensor) -> Tensor:
        return value if isinstance(value, DTensor) or not value.dim() else self._replicated(value)

    def _read(self) -> None:
        for parameter, tensor in self._whole.items():
            tensor.grad = None if parameter.grad is None else self._replicated(parameter.grad)

    def _write(self) -> None:
        for parameter, tensor in self._whole.items():
            if parameter in self._masters and tensor.grad is not None:
                parameter.data.copy_(self._masters[parameter])
            tensor.grad = None

    def _replicated(self, values: Tensor) -> Tensor:
        everywhere = [Replicate()] * self._mesh.ndim
        return DTensor.from_local(values, self._mesh, everywhere, run_check=False)
