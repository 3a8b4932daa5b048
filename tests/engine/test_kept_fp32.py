"""What `precision.keep_fp32` matches, and what becomes of it before a model is sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from unishard.config import Precision, Sharding
from unishard.contract.kit import kept_fp32
from unishard.contract.kit.dtypes import cast_model, cast_to_compute
from unishard.engine.model.shape import shape_of
from unishard.engine.optim.compute_groups import separate
from unishard.errors import ConfigError


class Gate(nn.Module):
    """A router with a bias that only buffers hold, as in mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))
        self.register_buffer("score_bias", torch.full((2,), 5.01))


class Listed(nn.Module):
    """Names what it keeps as a transformers model does."""

    _keep_in_fp32_modules = ("wo",)
    _keep_in_fp32_modules_strict = ("gate.*bias", "norm")

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.wo, self.norm, self.other = Gate(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.wo = Listed(), nn.Linear(2, 2)


def names(model: nn.Module, **precision: object) -> tuple[set[str], set[str]]:
    found = kept_fp32.find_kept(model, Precision.model_validate(precision))
    return set(found.parameters), set(found.buffers)


NORM, STATISTICS = {"inner.norm.weight", "inner.norm.bias"}, {"inner.norm.running_mean", "inner.norm.running_var"}


def test_a_models_lists_count_as_in_transformers() -> None:
    assert names(Around(), compute="bf16") == (NORM, {"inner.gate.score_bias", *STATISTICS})
    assert names(Around(), compute="fp16")[0] == NORM | {"inner.wo.weight", "inner.wo.bias"}, (
        "not the wo of the model around it"
    )
    assert names(Around(), compute="fp32") == names(Around(), compute="bf16", keep_fp32=[]) == (set(), set())
    shape = shape_of(Around(), Sharding())
    planned = {each.name for each in shape.parameters if each.kept(Precision(compute="fp16"))}
    assert planned == names(Around(), compute="fp16")[0]


def test_a_pattern_keeps_a_weight_under_all_its_names_and_the_buffers_of_its_module() -> None:
    model = Around()
    model.wo.weight = model.inner.other.weight = nn.Parameter(torch.ones(2, 2))
    assert names(model, compute="bf16", keep_fp32=[r"other\.weight"])[0] == {"inner.other.weight"}
    assert names(model, compute="bf16", keep_fp32=["norm"]) == (NORM, STATISTICS)


def test_what_is_kept_is_cast_up_and_nothing_else() -> None:
    model = Around().to(torch.bfloat16)
    cfg = Precision(compute="bf16", buffers="bf16")
    kept_fp32.mark_kept(model, kept_fp32.find_kept(model, cfg).names)
    cast_model(model, cfg, train=False)
    cast_to_compute(model.parameters(), cfg)
    full = {name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.dtype == torch.float32}
    assert full == NORM | STATISTICS | {"inner.gate.score_bias"}
    assert [*kept_fp32.modules_kept(model)] == [model.inner.norm]


def test_groups_of_an_optimizer_hold_one_dtype_and_the_16_bit_ones_come_first() -> None:
    model = Listed()
    kept_fp32.mark_kept(model, kept_fp32.find_kept(model, Precision(compute="fp16")).names)
    parts = ([*model.norm.parameters()], [*model.wo.parameters(), *model.other.parameters()], [model.gate.weight])
    optimizer = torch.optim.SGD(
        [{"params": part, "lr": rate} for part, rate in zip(parts, (1.0, 2.0, 3.0), strict=True)]
    )
    with pytest.raises(ConfigError, match="StepLR has a rate for each group"):
        separate(optimizer, scheduler := StepLR(optimizer, 1))
    for held in ([torch.zeros_like(model.wo.weight)], torch.optim.SGD(model.parameters())):
        optimizer.held = held  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"SGD holds other .* groups of their own, behind the others"):
            separate(optimizer, None)
        del optimizer.held
    separate(optimizer, None)
    found = [([*map(id, group["params"])], group["lr"]) for group in optimizer.param_groups]
    expected = [
        (model.other.parameters(), 2.0),
        ([model.gate.weight], 3.0),
        (model.norm.parameters(), 1.0),
        (model.wo.parameters(), 2.0),
    ]
    assert found == [([*map(id, part)], rate) for part, rate in expected]
    optimizer.step()
    scheduler.step()  # by a loop that has not passed it
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate / 10 for _, rate in expected])
