"""The loss scale follows torch's own GradScaler."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unishard.config import Precision
from unishard.engine.optim.loss_scale import LossScale


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_a_dynamic_scale_is_that_of_grad_scaler(overflows: list[bool], interval: int) -> None:
    own = LossScale(Precision(compute="fp16", initial_loss_scale=1024.0, loss_scale_growth_interval=interval))
    torchs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflow in overflows:
        assert own.value == torchs.get_scale()
        torchs.scale(torch.ones(()))
        weight.grad = torch.full((1,), float("inf") if overflow else 1.0)
        torchs.step(optimizer)
        torchs.update()
        own.end_window(skipped=overflow)
    assert own.value == (torchs.get_scale() if overflows else 1024.0)


def test_a_number_stays() -> None:
    scale = LossScale(Precision(compute="fp16", loss_scale=3.0))
    assert not scale.end_window(skipped=True)
    assert scale.value == 3.0
    assert scale.scale(torch.tensor(2.0, dtype=torch.float16)) == torch.tensor(6.0)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_nothing_is_scaled_elsewhere(compute: str) -> None:
    scale = LossScale(Precision.model_validate({"compute": compute}))
    loss = torch.tensor(2.0)
    assert scale.scale(loss) is loss
    assert not scale.end_window(skipped=True)
    assert scale.value == 1.0


def test_an_fp16_loss_is_scaled_in_fp32_and_growth_has_an_end() -> None:
    scale = LossScale(Precision(compute="fp16", initial_loss_scale=2.0**126, loss_scale_growth_interval=1))
    for _ in range(3):
        scale.end_window(skipped=False)
    assert scale.value == 2.0**127
    assert torch.isfinite(scale.scale(torch.tensor(1.5, dtype=torch.float16)))
