"""The planned bytes of persistent state equal the counted ones of real ranks; the planned traffic equals that of the collectives."""

from __future__ import annotations

import pytest
import torch
from counting import begin, counted
from playing import STRATEGIES, play, values

import unishard
from unishard.config import Config
from unishard.engine.model.shape import shape_of
from unishard.plugins import registry
from unishard.testing.cells import BACKENDS
from unishard.testing.features.lora import lora
from unishard.testing.models import MODELS, batch

PURE = {"compute": "bf16", "master": "bf16"}
LOW = {"compute": "bf16", "reduce": "bf16", "accumulate": "bf16"}
GROUPS = {"name": "adam", "weight_decay": 0.1, "no_decay": ["bias", "norm"], "groups": [{"params": ["head"], "lr": 1e-4}], "amsgrad": True}
HYBRID = ("hybrid_shard", "hybrid_shard_grad_op")


def _on_two(backend):
    for strategy in STRATEGIES:
        base = {"sharding": strategy}
        yield "mlp", base
        yield "mlp", base | {"precision": PURE}
        yield "lora", base | {"precision": "bf16"}
        if strategy != "no_shard":
            yield "mlp", base | {"precision": "bf16", "offload": {"optimizer": "cpu"}}
            if backend == "deepspeed":
                yield "mlp", base | {"offload": {"optimizer": "cpu"}}
                yield "mlp", base | {"precision": LOW}
    yield "mlp", {"precision": "bf16", "offload": "cpu"}
    yield "mlp", {"sharding": "shard_optimizer", "optimizer": GROUPS}
    for optimizer in ({"name": "sgd", "momentum": 0.9}, {"name": "adagrad"}):
        yield "mlp", {"optimizer": optimizer}
    if backend == "fsdp":
        yield "mlp", {"sharding": "shard_optimizer", "native": {"fsdp": {"zero_redundancy_optimizer": True}}}
        yield "mlp", {"optimizer": {"name": "sgd"}}


def _on_four(backend):
    for strategy in (*STRATEGIES, *HYBRID):
        sharding = {"strategy": strategy} | ({"group_size": 2} if strategy in HYBRID else {})
        yield "mlp", {"sharding": sharding, "precision": "bf16"}
    yield "mlp", {}
    yield "lora", {"precision": "bf16"}
    yield "mlp", {"precision": "bf16", "offload": "cpu"}


CELLS = {
    world: tuple((model, {"backend": backend} | sections) for backend in BACKENDS for model, sections in cells(backend))
    for world, cells in ((2, _on_two), (4, _on_four))
}


def _key(cell):
    model, sections = cell
    return model, repr(sections)


def _build(model):
    return lora(torch.bfloat16) if model == "lora" else MODELS[model].build()


def measured(model, text):
    """What was planned for this rank, and what it holds after a step of two micro-batches."""
    cfg = Config.model_validate({"training": {"micro_batch_size": 2, "gradient_accumulation_steps": 2}, **eval(text, {})})
    topology = unishard.Topology.from_environment()
    begin()
    built = _build(model)
    planned = registry.get(cfg.backend).footprint(shape_of(built, cfg.sharding), cfg, topology)
    data = "llama" if model == "lora" else model
    with unishard.prepare(built, cfg) as engine:
        for turn in range(2):
            engine.backward(engine(**batch(data, 2 * turn + topology.rank, 2)).loss)
            engine.step()
        return planned, counted(engine)


@pytest.mark.parametrize("world", CELLS)
def test_planned_state_is_held(world):
    scenarios = tuple((measured, _key(cell)) for cell in CELLS[world])
    wrong = []
    for scenario, outcomes in play(scenarios, world).items():
        for rank, (planned, held) in enumerate(values(outcomes)):
            expected = {
                "parameters": planned.parameters.total,
                "masters": planned.masters.total,
                "optimizer": planned.optimizer.total,
                "buffers and gradients": planned.buffers.total + planned.kept_gradients.total,
            }
            got = {name: held[name] for name in ("parameters", "masters", "optimizer")}
            got["buffers and gradients"] = held["buffers"] + held["gradients"] + held["rest"]
            if got != expected:
                wrong.append(f"{scenario[1]} rank {rank}: planned {expected}, held {got}")
    assert not wrong, "\n".join(wrong)
