"""Weights of which each rank has slices, before any engine: losses and gradients are those of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import in_ranks, my_rank, refused
from tensor_models import FAMILIES, PLAN, build
from torch import nn

from unishard.distributed.slices import slice_of
from unishard.parallel.groups import Groups, make_groups
from unishard.parallel.tensor import TensorSlices

EQUAL = [name for name in FAMILIES if name != "three heads"]


def groups() -> Groups:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return make_groups(2)


def plan_of(name: str) -> Any:
    return PLAN if name == "own" else "auto"


def tokens(number: int = 0) -> torch.Tensor:
    return torch.randint(1, 31, (2, 6), generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module) -> torch.Tensor:
    output = model(input_ids=tokens(), labels=tokens())
    return output if isinstance(output, torch.Tensor) else output.loss


def gradients(model: nn.Module, part: Groups) -> dict[str, torch.Tensor]:
    """As of an engine that takes means over all ranks of whole parameters."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
            if slice_of(parameter) is None:
                dist.all_reduce(found[name], group=part.peers)
                found[name] /= part.size
    return found


def compared(plain: nn.Module, model: nn.Module, part: Groups) -> None:
    expected = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    found = gradients(model, part)
    largest = max(float(each.abs().max()) for each in expected.values())
    assert found.keys() == expected.keys()
    for name, parameter in model.named_parameters():
        if name in expected:
            mark = slice_of(parameter)
            own = expected[name] if mark is None else mark.cut(expected[name])
            torch.testing.assert_close(found[name], own, rtol=1e-5, atol=2e-6 * largest, msg=name)


@in_ranks(
    cells=tuple((name,) for name in (*EQUAL, "own", "lora", "lora, biased", "lora, saved")),
)
def test_gradients_are_those_of_the_whole_model(name):
    part, plain, model = groups(), build(name), build(name)
    expected, before = loss_of(plain), [parameter.detach().clone() for parameter in model.parameters()]
    expected.backward()
    slices = TensorSlices(model, plan_of(name), part)
    slices.count_gradients(over_holders=True)
    loss = loss_of(model)
    slices.prove()
    loss.backward()
    compared(plain, model, part)
    cut = [name for name, parameter in model.named_parameters() if slice_of(parameter) is not None]
    slices.close()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert len(cut) >= 8
    assert all(torch.equal(*each) for each in zip(model.parameters(), before, strict=True))
    assert loss_of(model).item() == expected.item()
    assert not any("forward" in vars(module) for module in model.modules())


@in_ranks(
    cells=(
        ("own", "auto", "Own comes without a plan; write one, as in parallel: {tensor: {size: 2, plan: {"),
        ("own", "layers.*.up=colwise", "layers.*.up names no module and no parameter"),
        ("own", "out=sequence_parallel", "the style sequence_parallel of out is not supported there; write one of"),
        ("own", "out=rowwise qkv.*=rowwise", "qkv.* names no module"),
        ("own", "norm=colwise", "cuts norm, which is LayerNorm and no nn.Linear"),
        ("own", "norm=replicate", "the plan cuts nothing of Own over 2 ranks"),
        ("own", "embed=embedding_colwise head=colwise_gather_output", "head.weight in two ways, as it is tied"),
        ("lora, dora", "auto", "q_proj, whose adapter (Linear) is not plain LoRA"),
        ("llama, quantized", "auto", "quantized weights, such as model.layers.0.mlp.up_proj.weight; load the model in"),
        ("lora, all words", "auto", "which is Embedding and no plain nn.Embedding; leave it out of the plan, or, if"),
        ("lora, some words", "auto", "which is TrainableTokensWrapper and no plain nn.Embedding"),
        ("lora, experts", "auto", "mlp.experts (ParamWrapper) are added up over ranks, but its weights are whole"),
        ("lora, parameter", "auto", "o_proj, whose adapter is one of a parameter; name the module in target_modules"),
        (
            "three heads",
            "auto",
            "is 2, which does not fit the 3 heads and 3 key and value heads of model.layers.0.self",
        ),
    )
)
def test_what_cannot_be_cut_is_refused_by_name(name, plan, expected):
    model, own = build(name), dict(each.split("=") for each in plan.split()) if "=" in plan else plan
    before = {key: (value.shape, value.data_ptr()) for key, value in model.named_parameters()}
    message = refused(TensorSlices, model, own, groups())
    assert expected in message
    assert before == {key: (value.shape, value.data_ptr()) for key, value in model.named_parameters()}
    assert not any("forward" in vars(module) for module in model.modules())


@in_ranks(
    cells=(
        (
            "scale",
            "scale has whole weights, and gets another input on each rank, so each has a part of their gradients",
        ),
        ("batches", "ranks of a group called Own with different inputs; give neighboring ranks the same batches"),
    )
)
def test_the_first_forward_proves_the_plan(what, expected):
    model, plan = build("own"), {name: style for name, style in PLAN.items() if name != what}
    TensorSlices(model, plan, groups())
    with torch.no_grad():  # nothing is trained
        loss_of(model)
    batch = tokens(my_rank() if what == "batches" else 0)
    assert expected in refused(model, input_ids=batch, labels=batch)
    assert not any(module._forward_pre_hooks for module in model.modules())
