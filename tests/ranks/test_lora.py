"""Frozen, adapted, tied and toggled parameters: what stays, what it costs, what is refused. Curves are held by the
conformance suite."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from harness import config, everyones, in_ranks, my_rank, own_share, play, refused, train, update, values
from harness.training import BACKENDS, FEWER, PAIRS, SPANNING
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import unishard
from dev.ranks.recording import Recorder
from unishard.testing.features.lora import lora
from unishard.testing.models import mlp

ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}
WORLD = 2


def own(parameter):
    """This rank's part of a parameter."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    if hasattr(parameter, "ds_tensor"):  # without the padding behind the last rank's part
        return parameter.ds_tensor[: max(0, parameter.ds_numel - parameter.ds_tensor.numel() * my_rank())]
    return parameter.data


def state_bytes(engine):
    """Of the optimizer, step counts left out."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    tensors = {
        id(tensor): tensor
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    }
    return sum(own(tensor).nbytes for tensor in tensors.values() if tensor.dim())


# -- a bf16 base with fp32 adapters ----------------------------------------------------------------


def adapted(backend, strategy, compute):
    """Losses of 3 updates, and what a rank holds after them and moves in them."""
    model = lora(torch.bfloat16)
    before = {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if not parameter.requires_grad
    }
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    with unishard.prepare(model, config(backend, strategy, precision=compute, optimizer=optimizer)) as engine:
        recorder = Recorder()
        with recorder:
            for micro_batch in engine.batches(own_share(3, "llama")):
                recorder.phase = "forward"
                loss = engine(**micro_batch).loss
                recorder.phase = "backward"
                engine.backward(loss)
                gradients = [
                    name
                    for name, parameter in engine.module.named_parameters()
                    if name in before and parameter.grad is not None
                ]
                engine.step()
                recorder.phase = "after"
        frozen = {name: own(parameter) for name, parameter in engine.module.named_parameters() if name in before}
        reduced = sum(
            event.numel
            for event in recorder.events
            if event.phase == "backward"
            and event.kind in ("reduce_scatter", "all_reduce", "reduce")
            and event.dtype != "uint8"
        )
        unchanged = engine_values(engine, before)
        return {
            "formats": {str(tensor.dtype).removeprefix("torch.") for tensor in frozen.values()},
            "frozen bytes": sum(tensor.nbytes for tensor in frozen.values()),
            "bytes": engine.weights.placement().param_bytes,
            "masters": engine.weights.placement().master_dtypes,
            "master numel": engine.weights.placement().master_numel,
            "state": state_bytes(engine),
            "gradients": gradients,
            "reduced": reduced / 3,
            "unchanged": unchanged,
        }


def engine_values(engine, before):
    """Whether this rank's parts are bit for bit what they were."""
    for name, parameter in engine.module.named_parameters():
        if name not in before:
            continue
        if isinstance(parameter, DTensor):
            whole = parameter.full_tensor()
        elif hasattr(parameter, "ds_tensor"):
            flat, part = before[name].flatten(), parameter.ds_tensor
            mine = flat[part.numel() * my_rank() :][: part.numel()]
            if not torch.equal(part.flatten()[: mine.numel()], mine):
                return False
            continue
        else:
            whole = parameter
        if not torch.equal(whole, before[name]):
            return False
    return True


ADAPTED = tuple((adapted, cell) for cell in SPANNING)
TRAINABLE = sum(parameter.numel() for parameter in lora().parameters() if parameter.requires_grad)
FROZEN = sum(parameter.numel() for parameter in lora().parameters() if not parameter.requires_grad)


def run(*cell):
    return values(play(ADAPTED)[adapted, cell])


@pytest.mark.parametrize("cell", [cell for _, cell in ADAPTED], ids="-".join)
def test_a_bf16_base_stays_bf16_and_is_held_once(cell):
    sharded = cell[1] == "full_shard" or (cell[0] == "fsdp" and cell[1] != "no_shard")
    parts = WORLD if sharded else 1
    slack = 2 * 24 * 41 if sharded else 0  # a row of each parameter that the ranks do not divide
    for rank in run(*cell):
        assert rank["formats"] == {"bfloat16"}
        assert 2 * FROZEN / parts - slack <= rank["frozen bytes"] <= 2 * FROZEN / parts + slack
        assert rank["bytes"] <= rank["frozen bytes"] + 4 * TRAINABLE
        assert rank["unchanged"]


@pytest.mark.parametrize("cell", [cell for _, cell in ADAPTED], ids="-".join)
def test_only_adapters_have_masters_state_and_gradients(cell):
    ranks = run(*cell)
    for rank in ranks:
        assert rank["masters"] == {"float32"}
        assert rank["master numel"] <= TRAINABLE
        assert rank["state"] <= 4 * TRAINABLE
        assert rank["gradients"] == []
    assert sum(rank["master numel"] for rank in ranks) >= TRAINABLE


@pytest.mark.parametrize("cell", [cell for _, cell in ADAPTED], ids="-".join)
def test_no_gradient_of_a_frozen_parameter_travels(cell):
    for rank in run(*cell):
        assert rank["reduced"] <= 1.5 * TRAINABLE < FROZEN / 4  # FSDP2 pads each adapter to whole rows of each rank


# -- stopping and starting -------------------------------------------------------------------------

TOGGLES = {1: ("blocks.1", False), 3: ("blocks.1", True), 4: ("inp", False)}
"""Before which update, what: something trains, stops, and trains again with the state it had."""
UPDATES = 5


def moments(engine):
    """`exp_avg` of every parameter, whole. Collective."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        if isinstance(parameter, DTensor):
            own = engine.optimizer.state[parameter]["exp_avg"]
            value = DTensor.from_local(
                own, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            ).full_tensor()
        elif hasattr(engine.optimizer, "optimizer"):
            from deepspeed.utils import safe_get_full_optimizer_state

            parameter.requires_grad_(True)  # else DeepSpeed shows nothing
            value = safe_get_full_optimizer_state(parameter, "exp_avg")
        else:
            value = engine.optimizer.state[parameter]["exp_avg"]
        found[name] = value.flatten().tolist()
    return found


@cache
def plain():
    """The same in plain torch."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for number in range(UPDATES):
        if number in TOGGLES:
            name, trainable = TOGGLES[number]
            model.get_submodule(name).requires_grad_(trainable)
        optimizer.zero_grad()
        window = everyones(number, number + 1, world=WORLD)
        model(**{key: torch.cat([part[key] for part in window]) for key in window[0]}).loss.backward()
        clip_grad_norm_(model.parameters(), torch.inf)
        optimizer.step()
    return {
        name: optimizer.state[parameter]["exp_avg"].flatten().tolist() for name, parameter in model.named_parameters()
    }


@in_ranks(cells=PAIRS)
def test_what_is_frozen_keeps_its_value_and_others_move_and_the_state_is_that_of_plain_torch(backend, strategy):
    """Adam's first moments of all parameters, where the engine keeps them."""
    with unishard.prepare(mlp(), config(backend, strategy, optimizer=ADAMW)) as engine:
        still = []
        for number, micro_batch in enumerate(engine.batches(own_share(UPDATES))):
            if number in TOGGLES:
                engine.weights.set_trainable(*TOGGLES[number])
            before = {name: own(parameter).clone() for name, parameter in engine.module.named_parameters()}
            update(engine, micro_batch)
            now = {name: own(parameter) for name, parameter in engine.module.named_parameters()}
            still.append({name for name, part in before.items() if part.numel() and torch.equal(now[name], part)})
        found = moments(engine)
    held = {name for name in found if name.startswith("blocks.1.")}
    assert still[0] == still[3] == set()
    assert set() < still[1] <= held
    assert set() < still[2] <= held
    assert set() < still[4] <= {"inp.weight", "inp.bias"}
    assert found.keys() == plain().keys()
    for name, value in found.items():
        assert value == pytest.approx(plain()[name], rel=1e-4, abs=1e-8), name


# -- what set_trainable refuses --------------------------------------------------------------------


def partly_frozen():
    model = mlp()
    model.inp.requires_grad_(False)
    return model


CALLS = {
    "frozen in prepare": ("inp.weight", True),
    "unknown": ("block.1", False),
    "everything": ("*", False),
    "all that is left": (["blocks", "head"], False),
}
REFUSALS = {
    "inside a window": "ContractError: weights.set_trainable was called inside an accumulation window",
    "different names": "RankMismatchError: ranks hold different calls of set_trainable",
    "closed": "ContractError: weights.set_trainable was called on a closed engine",
    "frozen in prepare": "ContractError: inp.weight was frozen when the model was prepared, so it has no fp32 master",
    "unknown": "ContractError: set_trainable: no parameter or module is called 'block.1'; did you mean blocks.1",
    "everything": "ContractError: set_trainable('*', False) would leave no trainable parameter",
    "all that is left": "ContractError: set_trainable(['blocks', 'head'], False) would leave no trainable parameter",
}


@in_ranks(cells=tuple(product(BACKENDS, REFUSALS)), in_turn=True)
def test_set_trainable_refuses(backend, what):
    call = ("head", False)
    with unishard.prepare(partly_frozen(), config(backend, training={"gradient_accumulation_steps": 2})) as engine:
        if what == "inside a window":
            update(engine, own_share(1)[0])
        elif what == "different names":
            call = ("head" if my_rank() else "blocks", False)
        elif what == "closed":
            engine.close()
        told = refused(engine.weights.set_trainable, *CALLS.get(what, call))
    assert told.startswith(REFUSALS[what])


# -- ties ------------------------------------------------------------------------------------------


@in_ranks(cells=FEWER)
def test_a_tie_stays_one_parameter_under_all_its_names(backend, strategy):
    """Before and after updates, and where it is frozen by the other name."""
    model = lora(tie_word_embeddings=True)
    model.requires_grad_(True)
    with unishard.prepare(model, config(backend, strategy)) as engine:
        names = [name for name, _ in engine.module.named_parameters(remove_duplicate=False)]
        first, second = (name for name in names if "embed_tokens" in name or "lm_head" in name)
        get = engine.module.get_parameter
        assert get(first) is get(second)
        train(engine, own_share(2, "llama"))
        assert get(first) is get(second)
        engine.weights.set_trainable(second, False)
        assert not get(first).requires_grad
        before = own(get(first)).clone()
        *_, (_, step) = train(engine, own_share(2, "llama"))
        assert torch.equal(own(get(first)), before)
    assert step.updated
