"""Faults are seeded into a training, and `unishard compare --same` finds each, and names the field or the module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import BACKENDS, MICRO_BATCH, config, my_rank, play, values
from torch.nn import functional

import unishard
from unishard.config.nested import merge, nested
from unishard.contract.tolerances import TOLERANCES
from unishard.testing.models import batch, mlp
from unishard.tools.compare.golden import ComparedRun, facts_of
from unishard.tools.compare.modules import first_module, modules_in
from unishard.tools.compare.modules import lines_of as module_text
from unishard.tools.compare.records import Course, read_records
from unishard.tools.compare.run_comparison import compare_runs, lines_of

STEPS = 6
PLAIN = {
    "training": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "seed": 3},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
}
IN_CONFIG = {
    "training.gradient_clipping": None,
    "precision.compute": "bf16",
    "training.gradient_accumulation_steps": 1,
    "optimizer.lr": 0.05,
    "optimizer.weight_decay": 0.0,
    "training.seed": 4,
}
"""Fields with another value."""
IN_SCRIPT = ("clipping", "scale", "data order")
RUNS = ("none", *IN_CONFIG, *IN_SCRIPT)


def settings(backend, fault):
    return config(backend, "no_shard", **merge(PLAIN, nested({fault: IN_CONFIG[fault]}) if fault in IN_CONFIG else {}))


def train(backend, fault, root):
    """A run with one fault, in its config or in its script."""
    cfg = settings(backend, fault)
    logging = {"to": ["jsonl"], "every_steps": 1, "dir": f"{root}/{backend}-{fault}"}
    cfg = unishard.load(merge(cfg.model_dump(exclude_unset=True), {"logging": logging}))
    world = unishard.Topology.from_environment().world_size
    turns = list(range(2 * STEPS))
    if fault == "data order":
        turns.reverse()
    data = [batch("mlp", (turn * world + my_rank()) * MICRO_BATCH, MICRO_BATCH) for turn in turns]
    scale = 0.5 if fault == "scale" else 1.0
    options = {"clip_grad_norm": None} if fault == "clipping" else {}
    with unishard.prepare(mlp(cfg.training.seed), cfg) as engine:
        for micro_batch in engine.batches(data):
            engine.backward(engine(**micro_batch).loss * scale)
            engine.step(**options)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("logs"))
    played = [(train, ("fsdp", run, root)) for run in RUNS] + [(train, ("deepspeed", "none", root))]
    for outcomes in play(tuple(played)).values():
        values(outcomes)

    def found(fault, backend="fsdp"):
        records = read_records(Path(root, f"{backend}-{fault}", "log.jsonl"))
        return ComparedRun(f"{backend}-{fault}", Course.of(records), facts_of(settings(backend, fault)))

    return found


def test_engines_agree(run_of):
    comparison = compare_runs(run_of("none", "deepspeed"), run_of("none"), "fp32")
    assert comparison.same, list(lines_of(comparison))
    assert comparison.distance.steps == STEPS
    assert BACKENDS == ("fsdp", "deepspeed")


@pytest.mark.parametrize("fault", IN_CONFIG)
def test_a_field_that_differs_is_named(run_of, fault):
    comparison = compare_runs(run_of(fault), run_of("none"), "fp32")
    assert fault in [field.path for field in comparison.fields]
    told = [*lines_of(comparison)]
    assert any(line.startswith(f"{fault} is ") for line in told)
    assert max(map(len, told)) <= 80


@pytest.mark.parametrize("fault", IN_SCRIPT)
def test_a_script_that_differs_is_found_and_no_field_is_blamed(run_of, fault):
    comparison = compare_runs(run_of(fault), run_of("none"), "fp32")
    assert not comparison.same
    assert comparison.fields == []


# -- the first module that differs -----------------------------------------------------------------

FAULTY = "blocks.1.down"
IN_MODULE = ("output", "gradient", "weights")
"""What a faulty module changes first: what it returns, what it passes back, or the gradient of its own weight."""


class DoubledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def seed_fault(model, what):
    """As one backend would have it in this module only."""
    module = model.get_submodule(FAULTY)
    if what == "output":
        module.register_forward_hook(lambda module, args, output: 1.5 * output)
    elif what == "gradient":  # of the module before it
        module.register_forward_pre_hook(lambda module, args: tuple(map(DoubledBackward.apply, args)))
    elif what == "weights":
        module.forward = lambda x: functional.linear(x, DoubledBackward.apply(module.weight), module.bias)


def train_with(backend, what, root):
    """Three steps, of which the modules of all are measured."""
    logged = {"to": ["jsonl"], "every_steps": 1, "module_steps": [1, 2, 3], "dir": f"{root}/{backend}-{what}"}
    model = mlp()
    seed_fault(model, what)
    with unishard.prepare(model, config(backend, logging=logged)) as engine:
        world = unishard.Topology.from_environment().world_size
        data = [batch("mlp", (turn * world + my_rank()) * MICRO_BATCH, MICRO_BATCH) for turn in range(3)]
        for micro_batch in engine.batches(data):
            engine.backward(engine(**micro_batch).loss)
            engine.step()


@pytest.fixture(scope="module")
def modules_of(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("modules"))
    runs = [("fsdp", what) for what in ("none", *IN_MODULE)] + [("deepspeed", "none"), ("deepspeed", "output")]
    for outcomes in play(tuple((train_with, (*run, root)) for run in runs)).values():
        values(outcomes)
    return lambda what, backend="fsdp": modules_in(Path(root, f"{backend}-{what}", "modules.jsonl").read_text())


@pytest.mark.parametrize(
    ("backend", "what", "module", "phase"),
    [
        ("fsdp", "output", FAULTY, "forward"),
        ("deepspeed", "output", FAULTY, "forward"),
        ("fsdp", "gradient", "blocks.1.up", "backward"),
        ("fsdp", "weights", FAULTY, "backward"),
    ],
)
def test_the_module_with_the_fault_is_named(modules_of, backend, what, module, phase):
    located = first_module(modules_of(what, backend), modules_of("none"), TOLERANCES["fp32"])
    assert located.first[:3] == (module, what, 1)
    (line,) = module_text(located)
    assert line.startswith(f"first module that differs: {module}, in the {phase} of step 1: ")


def test_modules_of_the_engines_agree(modules_of):
    located = first_module(modules_of("none", "deepspeed"), modules_of("none"), TOLERANCES["fp32"])
    assert located.first is None
    assert located.notes[0].startswith("all modules agree: the largest difference is ")


def test_an_update_that_differs_is_seen_in_the_weights(modules_of):
    steps = modules_of("weights")
    located = first_module({2: steps[2]}, modules_of("none"), TOLERANCES["fp32"])
    assert (located.first.what, located.first.step) == ("output", 2)
    one, other = (steps[2].parameters[f"{FAULTY}.weight"]["weight_norm"] for steps in (steps, modules_of("none")))
    far = f"{abs(one - other) / other:.1e}"
    assert located.notes == (
        f"the weights differ before step 2, most {FAULTY}.weight ({far}): the update after step 1 differs",
    )
