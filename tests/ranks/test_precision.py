"""Number formats: the loss scale of fp16, masters, buffers, and what models and callers see of it."""

from __future__ import annotations

import math
from collections import UserDict

import pytest
import torch
from harness import PAIRS, STRATEGIES, config, in_ranks, my_rank, of_all_ranks, own_share, prepare, refused, train
from harness.training import FEWER
from torch import nn
from torch.distributed.tensor import DTensor

import unishard
from unishard.testing.models import Mlp, llama, mlp


def held(module):
    """Copies of what this rank keeps of the parameters."""
    with torch.no_grad():
        parts = (
            parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in module.parameters()
        )
        return [getattr(part, "ds_tensor", part).detach().clone() for part in parts]


def state_of(engine):
    """Copies of the optimizer's state, on this rank."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone() for tensor in found]


def unchanged(before, after):
    return len(before) == len(after) and all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


# -- products of fp32 tensors ----------------------------------------------------------------------


@in_ranks
def test_products_have_one_setting_in_a_process_and_another_is_refused():
    """torch's setting after each `prepare` in one process."""

    def prepared(backend, matmul, train_):
        unishard.prepare(mlp(), config(backend, precision={"matmul": matmul}), train=train_).close()
        return torch.get_float32_matmul_precision()

    assert prepared("deepspeed", "keep", True) == "highest"
    assert prepared("deepspeed", "tf32", True) == "high"
    assert prepared("fsdp", "tf32", False) == "high"
    assert prepared("fsdp", "keep", True) == "high"
    told = refused(prepared, "fsdp", "fp32", True)
    assert refused(prepared, "deepspeed", "fp32", False) == told
    assert "precision.matmul: is fp32, but an earlier prepare of this process has set tf32" in told
    assert "write tf32 or keep, or use another process" in told


# -- the loss scale --------------------------------------------------------------------------------


@in_ranks(cells=PAIRS)
def test_a_step_that_one_rank_overflows_is_skipped_on_all_and_leaves_everything_as_it_was(backend, strategy):
    """Six updates; in the third, one rank's gradient overflows fp16 and the other's does not."""
    formats = {"compute": "fp16", "initial_loss_scale": 8.0, "loss_scale_growth_interval": 2}
    falling = {"name": "linear", "total_steps": 10}
    cfg = config(backend, strategy, precision=formats, scheduler=falling, optimizer={"name": "adamw", "lr": 1e-2})
    log = []
    with prepare(cfg) as engine:
        for turn, batch in enumerate(own_share(6)):
            loss = engine(**batch).loss
            engine.backward(loss * (1e6 if turn == 2 and my_rank() == 1 else 1.0))
            before = held(engine.module), state_of(engine)
            scale, lr = engine.gradients.loss_scale, engine.lr
            step = engine.step()
            after = held(engine.module), state_of(engine)
            same = [unchanged(one, other) for one, other in zip(before, after, strict=True)]
            log.append((scale, step.updated, step.skipped, step.grad_norm, same, engine.lr == lr))
        last = engine.gradients.loss_scale
    norms = of_all_ranks([entry[3] for entry in log])
    # Doubled after two updates in a row, halved by the skipped one.
    assert [entry[0] for entry in log] == [8, 8, 16, 8, 8, 16]
    assert last == 16
    assert [entry[1:3] for entry in log] == [(True, False)] * 2 + [(False, True)] + [(True, False)] * 3
    assert log[2][3] == float("inf")
    assert log[2][4] == [True, True], "neither parameters nor the optimizer's state"
    assert log[2][5], "nor the schedule"
    assert log[3][4] == [False, False]
    assert not log[3][5]
    assert norms[0] == norms[1]


@in_ranks(cells=PAIRS)
def test_neither_losses_nor_norms_nor_what_a_user_sees_and_sets_depend_on_the_scale(backend, strategy):
    """Nor the norms of a window's gradients, before and after one of them is doubled."""
    done = {}
    for scale in (1.0, 64.0):
        formats = {"compute": "fp16", "loss_scale": scale}
        with prepare(config(backend, strategy, precision=formats, training={"gradient_clipping": 1.0})) as engine:
            done[scale] = [(loss, step.grad_norm) for loss, step in train(engine, own_share(3))]
            assert engine.gradients.loss_scale == scale
    for found, wanted in zip(done[64.0], done[1.0], strict=True):
        assert found == pytest.approx(wanted, rel=2e-3)  # at a scale of 1 small fp16 gradients are denormal
    with prepare(config(backend, strategy, precision={"compute": "fp16", "loss_scale": 64.0})) as engine:
        engine.backward(engine(**own_share(1)[0]).loss)
        before = engine.gradients.norms()
        engine.gradients.write("head.weight", 2 * engine.gradients.read("head.weight"))
        after = engine.gradients.norms()
        norm = engine.step().grad_norm
    assert math.hypot(*before.values()) == pytest.approx(done[64.0][0][1], rel=1e-5)
    assert after == pytest.approx(before | {"head.weight": 2 * before["head.weight"]}, rel=1e-6)
    assert norm == pytest.approx(math.hypot(*after.values()), rel=1e-5)


@in_ranks(cells=tuple((*cell, dynamic) for cell in FEWER for dynamic in (True, False)), in_turn=True)
def test_an_error_is_raised_once_a_lower_scale_cannot_help(backend, strategy, dynamic):
    """An infinite gradient of one rank where the user wants an error; then what is left of the scale."""
    formats = {"compute": "fp16", "initial_loss_scale" if dynamic else "loss_scale": 4.0}
    with prepare(config(backend, strategy, precision=formats, training={"nonfinite": "raise"})) as engine:
        log = []
        for batch in own_share(3):
            engine.backward(engine(**batch).loss * (float("inf") if my_rank() else 1.0))
            log.append(refused(engine.step).partition(":")[0])
        scale = engine.gradients.loss_scale
    assert log == (["nothing", "nothing", "NonFiniteError"] if dynamic else ["NonFiniteError"] * 3)
    assert scale == (0.5 if dynamic else 4.0)


# -- masters ---------------------------------------------------------------------------------------


def in_format(dtype):
    model = mlp()
    for index, parameter in enumerate(model.parameters()):
        parameter.data = parameter.data.to(
            dtype if dtype is not None else (torch.float32, torch.bfloat16, torch.float16)[index % 3]
        )
    return model


FORMATS = (
    (torch.bfloat16, "fp32", "fp32"),
    (torch.bfloat16, "bf16", "fp32"),
    (torch.float16, "fp16", "fp32"),
    (None, "bf16", "fp32"),
    (torch.float32, "bf16", "bf16"),
)
LOADED = tuple(
    (*cell, *formats)
    for place, cell in enumerate(PAIRS)
    for number, formats in enumerate(FORMATS)
    if (place + place // len(STRATEGIES) + number) % 2 == 0
)
"""Each of the formats with every strategy on one of the engines."""
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@in_ranks(cells=LOADED)
def test_masters_and_state_have_the_asked_format_whatever_the_model_was_loaded_in(
    backend, strategy, loaded, compute, master
):
    formats = {"compute": compute, "master": master}
    optimizer = {"name": "adamw", "lr": 1e-6, "weight_decay": 0.0}
    cfg = config(backend, strategy, precision=formats, optimizer=optimizer)
    with unishard.prepare(in_format(loaded), cfg) as engine:
        train(engine, own_share(2))
        state = {tensor.dtype for tensor in state_of(engine) if tensor.dim()}
        logits, placement = engine(**own_share(1)[0]).logits, engine.weights.placement()
    assert placement.master_dtypes == {NAMES[master]}
    assert state == {getattr(torch, NAMES[master])}
    assert logits.dtype == getattr(torch, NAMES[compute])


@in_ranks
def test_fp16_masters_under_zero_are_refused_with_what_instead():
    told = refused(prepare, config("deepspeed", precision={"compute": "fp16", "master": "fp16"}))
    assert told.startswith("TranslationError: ")
    assert "precision.master: 'fp16' is not supported by deepspeed" in told
    assert "write fp32" in told


# -- buffers and inputs ----------------------------------------------------------------------------


@in_ranks(cells=tuple((*cell, wanted) for cell in FEWER for wanted in ("keep", "bf16")))
def test_buffers_keep_their_bits_unless_another_format_is_asked_for(backend, strategy, wanted):
    """The rotary table, which bf16 cannot hold, after training."""
    cfg = config(backend, strategy, precision={"compute": "bf16", "buffers": wanted})
    with unishard.prepare(llama(), cfg) as engine:
        train(engine, own_share(1, "llama"))
        found = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    original = {name: buffer for name, buffer in llama().named_buffers() if buffer.is_floating_point()}
    assert original
    for name, buffer in original.items():
        assert found[name].dtype == (torch.float32 if wanted == "keep" else torch.bfloat16)
        assert torch.equal(found[name], buffer.to(found[name].dtype))
        assert torch.equal(found[name].double(), buffer.double()) == (wanted == "keep")


class Encoding(UserDict):
    """As a transformers BatchEncoding."""


class Nested(nn.Module):
    """Takes its batch as a whole, beside a nested keyword, and notes the formats."""

    seen = ()

    def __init__(self):
        super().__init__()
        self.model = Mlp()

    def forward(self, batch, more):
        tensors = (batch["x"], more["pair"][0], more["pair"][1], batch["labels"])
        self.seen = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors), type(batch).__name__
        return self.model(batch["x"] + more["pair"][0], batch["labels"])


NESTED = tuple(
    (*cell, compute)
    for place, cell in enumerate(PAIRS)
    for number, compute in enumerate(("fp32", "bf16", "fp16"))
    if (place + place // len(STRATEGIES) + number) % 2 == 0
)
"""Each compute format with every strategy on one of the engines."""


@in_ranks(cells=NESTED)
def test_floating_inputs_are_cast_wherever_they_are_and_outputs_have_the_compute_format(backend, strategy, compute):
    with unishard.prepare(Nested(), config(backend, strategy, precision=compute)) as engine:
        given = Encoding(own_share(1)[0])
        output = engine(given, more={"pair": (torch.zeros(13), torch.arange(2))})
        seen = engine.module.seen
    dtype = NAMES[compute]
    assert seen == ((dtype, dtype, "int64", "int64"), "Encoding")
    assert output.logits.dtype == getattr(torch, dtype)
    assert given["x"].dtype == torch.float32, "the caller's batch is left alone"
