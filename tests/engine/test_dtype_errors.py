"""An error of torch about dtypes in a 16-bit forward names the module, its fp32 buffers and the field."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from unishard.config import Precision
from unishard.engine.loop.forward_errors import explain_dtype
from unishard.errors import ModelError

BF16, FP16 = Precision(compute="bf16"), Precision(compute="fp16")


class Layer(nn.Module):
    """Computes with its input and a table."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.register_buffer("table", torch.ones(8, 8))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.table)


class Outside(nn.Module):
    """Hands a table of the root to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(8, 8))
        self.layer = nn.Linear(8, 8).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.table, self.layer.weight) + self.layer(self.table)


def told(model: nn.Module, precision: Precision = BF16, dtype: torch.dtype = torch.bfloat16) -> ModelError | None:
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(8, 8, dtype=dtype))
    return explain_dtype(caught.value, model, precision)


def put(x: Tensor, table: Tensor) -> Tensor:
    return x.index_put((torch.tensor([0]),), table[0])


OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": torch.matmul,
    "linear": functional.linear,
    "conv": lambda x, table: functional.conv1d(x[None], table[:, :, None]),
    "bmm": lambda x, table: torch.bmm(x[None], table[None]),
    "addmm": lambda x, table: torch.addmm(x, x, table),
    "index_put": put,
    "attention": lambda x, table: functional.scaled_dot_product_attention(
        x[None, None], table[None, None], table[None, None]
    ),
    "batch_norm": lambda x, table: functional.batch_norm(x, table[0], table[1], x[0], x[1], training=True),
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(("precision", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)], ids=["bf16", "fp16"])
def test_the_module_its_buffers_and_the_field_are_named(
    operator: str, precision: Precision, dtype: torch.dtype
) -> None:
    error = told(nn.Sequential(nn.Identity(), Layer(OPERATORS[operator])), precision, dtype)
    assert error is not None
    assert str(error).startswith(f"the forward of 1 computes with tensors in fp32 and {precision.compute} (")
    assert "leaves buffers in fp32: 1.table; set precision.buffers to " + precision.compute in str(error)


def test_buffers_of_a_module_around_it_are_named() -> None:
    error = str(told(Outside()))
    assert error.startswith("the forward of the model computes")
    assert "leaves buffers in fp32: table; set" in error


class Widened(nn.Module):
    """Multiplies by a tensor that it makes in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(8, 8)


def test_without_buffers_the_fields_that_cast_are_named() -> None:
    error = str(told(nn.Sequential(Widened())))
    assert error.startswith("the forward of 0 computes with tensors in fp32 and bf16")
    assert "precision.cast_inputs" in error
    assert "precision.buffers" not in error


def test_other_errors_stay_as_they_are() -> None:
    layer = Layer(torch.matmul)
    assert told(nn.Sequential(layer), Precision()) is None
    assert told(nn.Sequential(Layer(lambda x, table: x @ table[:3].bfloat16()))) is None
    layer.table = layer.table.double()
    assert told(nn.Sequential(layer)) is None


def test_experts_of_sizes_that_torch_does_not_multiply_in_groups() -> None:
    class Experts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.grouped_mm(
                x, torch.ones(2, 8, 12).bfloat16(), offs=torch.tensor([4, 8], dtype=torch.int32)
            )

    error = str(told(nn.Sequential(Experts())))
    assert error.startswith(
        "the forward of 0 multiplies experts in groups, which torch does in bf16 only if their sizes are multiples of "
        "8 ("
    )
    assert "call model.set_experts_implementation('eager') before prepare" in error
