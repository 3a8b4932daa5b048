"""A linear layer whose weight is stored in few bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unishard.engine.model.quantization.storage import Storage

SCALES = "scales"
"""Name of the parameter that has them."""


class QuantizedLinear(nn.Linear):
    """`nn.Linear` with two frozen parameters of bytes in place of its weight.

    Its `weight` has no elements: peft takes from it where new adapters are to be (0.21, tuners/lora/model.py,
    _replace_module), which is the CPU while the bytes are not read yet.
    """

    is_quantized = True
    """What an export of the whole model refuses."""
    storage: Storage
    compute_dtype: torch.dtype | None
    """What inputs are cast to, and the output back; None for the dtype of the inputs."""
    scales: nn.Parameter

    def __init__(self, storage: Storage, elements: Tensor, scales: Tensor, bias: nn.Parameter | None = None) -> None:
        """Hold the bytes.

        Args:
            storage: How they are laid out.
            elements: Flat uint8, on any device.
            scales: The same.
            bias: `(out,)`.
        """
        nn.Module.__init__(self)
        self.out_features, self.in_features = storage.shape
        self.set_bytes(storage, elements, scales)
        self.register_parameter("bias", bias)
        self.compute_dtype = None

    def set_bytes(self, storage: Storage, elements: Tensor, scales: Tensor) -> None:
        """Register the parameters."""
        self.storage = storage
        self.register_parameter(self.elements_name, nn.Parameter(elements, requires_grad=False))
        self.register_parameter(SCALES, nn.Parameter(scales, requires_grad=False))

    @property
    def elements_name(self) -> str:
        """Name of the parameter that has the elements: a checkpoint of another type has no such parameter."""
        return f"quantized_{self.storage.type}"

    @property
    def quantized(self) -> nn.Parameter:
        """The elements."""
        elements: nn.Parameter = getattr(self, self.elements_name)
        return elements

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # a parameter of nn.Linear
        """An empty uint8 tensor."""
        here = self.quantized.device
        return torch.empty(0, dtype=torch.uint8, device="cpu" if here.type == "meta" else here)

    def forward(self, input: Tensor) -> Tensor:
        """`(..., in)` to `(..., out)`."""
        dtype = self.compute_dtype or input.dtype
        tensors = (input.to(dtype), self.quantized, self.scales, self.bias)
        product: Tensor = _Product.apply(*tensors, self.storage)  # type: ignore[no-untyped-call]
        return product.to(input.dtype)

    def extra_repr(self) -> str:
        """Sizes and type."""
        return f"{self.in_features}, {self.out_features}, type={self.storage.type}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """Keeps the parameters for backward, not the weight: engines free and gather them in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, elements: Tensor, scales: Tensor, bias: Tensor | None, storage: Storage) -> Tensor:
        ctx.storage, ctx.has_bias = storage, bias is not None
        ctx.save_for_backward(elements, scales)
        return storage.product(x, elements, scales, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        of_input = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = gradient @ ctx.storage.backward_weight(*ctx.saved_tensors, gradient.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return of_input, None, None, of_bias, None


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """The quantized layers by name."""
    return ((name, each) for name, each in model.named_modules() if isinstance(each, QuantizedLinear))
