"""Each private name of DeepSpeed, renamed inside DeepSpeed: only the runs that need it are refused, with a clear error.

Every entry of the table has a run that meets its case, and every name of it is renamed while that run is played. The
others train: an ordinary run of each stage, with the names of all other cases renamed at once.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import pytest
import torch
from expert_models import build
from harness import DEEP, config, my_rank, play, refused, values
from renaming import renamed
from torch import nn
from torch.nn import functional

import unishard
from unishard.engine.place import Phase
from unishard.failures import lifetime
from unishard.testing.models import MlpOutput
from unishard_deepspeed.private import PRIVATE_API

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}


class Branching(nn.Module):
    """Runs its second branch only when told to; its blocks are units of several modules."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.sometimes = nn.Linear(7, 5)
        self.head = nn.Linear(7, 5)

    def forward(self, x, both=True):
        hidden = self.blocks[1](self.blocks[0](x))
        logits = self.head(hidden) + (self.sometimes(hidden) if both else 0.0)
        return MlpOutput(functional.cross_entropy(logits.float(), torch.arange(4)), logits)


WHOLE = {"replicate": ["sometimes"]}


def prepared(strategy, precision="fp32", whole=(), **sections):
    torch.manual_seed(5)
    sharding = (strategy if isinstance(strategy, dict) else {"strategy": strategy}) | (
        {"conditional_modules": list(whole)} if whole else {}
    )
    return unishard.prepare(Branching(), config("deepspeed", sharding, precision=precision, optimizer=SGD, **sections))


def update(engine, both=True, **step):
    engine.backward(engine(torch.ones(4, 7), both=both).loss)
    return engine.step(**step)


# -- a run for each case ---------------------------------------------------------------------------


def trains(strategy, precision="fp32", **sections):
    with prepared(strategy, precision, **sections) as engine:
        assert all(update(engine).updated for _ in range(2))
        assert engine.weights.placement().param_bytes


def leaves_out(strategy, precision="fp32", **sections):
    with prepared(strategy, precision, **sections) as engine:
        update(engine)
        update(engine, both=False)
        update(engine)


def misses_at_first(strategy, **sections):
    """The first micro-batch of a window does not use what the second does."""
    with prepared(strategy, training={"gradient_accumulation_steps": 2}, **sections) as engine:
        for both in (True, True, False, True):
            update(engine, both)


def skips(strategy, **sections):
    with prepared(strategy, **sections) as engine:
        engine.backward(engine(torch.full((4, 7), torch.nan)).loss)
        engine.step()
        update(engine)


def saves_by_itself(strategy, precision="fp32"):
    """Refused before anything is changed: the config says that it saves."""
    prepared(strategy, precision, checkpoint={"dir": "never-written", "every_steps": 100}).close()


def trains_an_empty_parameter(strategy):
    model = Branching()
    model.nothing = nn.Parameter(torch.zeros(0, 3))
    with unishard.prepare(model, config("deepspeed", strategy, optimizer=SGD)) as engine:
        assert update(engine).updated


def divides_experts(strategy):
    cfg = config("deepspeed", strategy, optimizer=SGD, parallel={"expert": 2})
    with unishard.prepare(build("own"), cfg) as engine:
        engine.backward(engine(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)))
        assert engine.step().updated


def starts_again(strategy):
    trains(strategy)
    lifetime.shutdown()
    trains(strategy)


def is_used_afterwards(strategy):
    """Training is served; what cannot be removed is said when the engine is closed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            trains(strategy)
        except UserWarning as warned:
            raise unishard.BackendError(str(warned)) from None


def does_not_compile(strategy):
    """Nothing is refused: DeepSpeed compiles, as it does by itself."""
    from unishard_deepspeed.private.building import compile_nothing

    compile_nothing()
    PRIVATE_API["no-compiler"].require()


def frees(strategy):
    """Nothing is refused: training is served, and the model stays in the memory of the process."""
    trains(strategy)
    PRIVATE_API["freed-models"].require()


OFFLOAD = {"offload": {"optimizer": "cpu"}}
FILES = {"offload": {"params": "nvme", "optimizer": "nvme", "nvme_path": "."}}
KEPT = {"precision": {"compute": "bf16", "keep_fp32": ["head"]}}
IGNORE = {"training": {"nonfinite": "ignore"}}
MEETING = {
    "leaf-gradients": (trains, "full_shard"),
    "fp16-on-cpu": (trains, "shard_grad_op", "fp16"),
    "weight-memory-stage-3": (trains, "full_shard", FILES),
    "empty-parameters": (trains_an_empty_parameter, "full_shard"),
    "second-process-group": (starts_again, "no_shard"),
    "no-compiler": (does_not_compile, "no_shard"),
    "closed-engines": (is_used_afterwards, "full_shard"),
    "freed-models": (frees, "full_shard"),
    "replica-groups-stages-1-2": (trains, "hybrid_shard_grad_op"),
    "replica-groups-stage-3": (trains, "hybrid_shard"),
    "second-copies": (
        trains,
        "full_shard",
        {"native": {"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": 2}}}},
    ),
    "slices-stage-0": (divides_experts, "no_shard"),
    "slices-stages-1-2": (divides_experts, "shard_grad_op"),
    "slices-stage-3": (divides_experts, "full_shard"),
    "conditional-modules-stages-1-2": (trains, "shard_grad_op", {"whole": ("Linear",)}),
    "conditional-modules-stage-3": (trains, "full_shard", {"whole": ("Linear",)}),
    "replicated-stages-1-2": (trains, {"strategy": "shard_grad_op", **WHOLE}, "fp32"),
    "replicated-stage-3": (trains, {"strategy": "full_shard", **WHOLE}, "fp32"),
    "kept-parameters-stages-1-2": (trains, "shard_grad_op", KEPT),
    "kept-parameters-stage-3": (trains, "full_shard", KEPT),
    "unused-stages-1-2": (leaves_out, "shard_grad_op", "bf16"),
    "unused-stage-3": (leaves_out, "full_shard", "bf16"),
    "stale-gradients": (misses_at_first, "full_shard"),
    "stale-offloaded-stages-1-2": (skips, "shard_grad_op", OFFLOAD),
    "stale-offloaded-stage-3": (misses_at_first, "full_shard", OFFLOAD),
    "nonfinite-stage-0": (trains, "no_shard", "fp16"),
    "nonfinite-stages-1-2": (trains, "shard_grad_op", IGNORE),
    "nonfinite-stage-3": (trains, "full_shard", IGNORE),
    "checkpoints-stages-1-2": (saves_by_itself, "shard_grad_op"),
    "checkpoints-stage-3": (saves_by_itself, "full_shard"),
}
"""Cases that a run meets: a function and its arguments."""


def read_gradients(engine):
    engine.gradients.write("head.bias", engine.gradients.read("head.bias"))


def read_masters(engine):
    engine.weights.write("head.bias", engine.weights.read("head.bias"))


def step(engine):
    engine.step()


def discard(engine):
    engine.discard()


def read_in_a_loss(engine):
    with torch.no_grad(), engine.weights.unsharded(["head.bias"]):
        pass


def clip_once(engine):
    engine.step(clip_grad_norm=0.1)


CALLS = {
    "divisor-stages-1-2": (step, "shard_grad_op", "fp32"),
    "divisor-stage-3": (step, "full_shard", "fp32"),
    "clipping": (clip_once, "shard_optimizer", "fp32"),
    "gradients-stage-0": (read_gradients, "no_shard", "fp32"),
    "gradients-stages-1-2": (read_gradients, "shard_grad_op", "bf16"),
    "gradients-stage-3": (read_gradients, "full_shard", "bf16"),
    "master-weights-stages-1-2": (read_masters, "shard_grad_op", "bf16"),
    "master-weights-stage-3": (read_masters, "full_shard", "fp32"),
    "discard-stage-0": (discard, "no_shard", "fp32"),
    "discard-stages-1-2": (discard, "shard_grad_op", "fp32"),
    "discard-stage-3": (discard, "full_shard", "fp32"),
    "unsharded-stage-3": (read_in_a_loss, "full_shard", "fp32"),
}
"""Cases that a call meets, after a backward: the call, and the engine's strategy and precision."""


# -- the renaming ----------------------------------------------------------------------------------

WITHIN = {
    # Elsewhere in DeepSpeed these are settings, arguments, or methods of strings.
    "clip_grad": "",
    "loss_scale": "",
    "offload_optimizer": "",
    "cpu_offload": "",
    "partition": "deepspeed.runtime.zero",
}
"""Where an attribute is renamed, if not in all of DeepSpeed; empty: in the module that defines it."""


def place(name):
    """Where to rename, and what."""
    module, attribute = name.partition(":")[0], name.replace(":", ".").rpartition(".")[2]
    return WITHIN.get(attribute, "deepspeed") or module, attribute


def load_deepspeed():
    """Modules that are imported later would keep their names."""
    import deepspeed.runtime.fp16.unfused_optimizer
    import deepspeed.runtime.zero.stage3
    import deepspeed.runtime.zero.stage_1_and_2
    import deepspeed.utils.groups  # noqa: F401


def meet(case):
    """What is said with each name of a case renamed, in a run of its own; after that it trains."""
    load_deepspeed()
    function, *arguments = MEETING[case]
    arguments, sections = list(arguments), {}
    if isinstance(arguments[-1], dict):
        sections = arguments.pop()
    if "hybrid" in arguments[0]:
        arguments[0] = {"strategy": arguments[0], "group_size": 2}
    said = {}
    for name in PRIVATE_API[case].names:
        with renamed(*place(name)) as changed:
            said[name] = refused(function, *arguments, **sections) if changed else "is nowhere in DeepSpeed"
    function(*arguments, **sections)
    return said


def call(case):
    """What a call of one engine says with each name of a case renamed; after that it is served."""
    load_deepspeed()
    act, strategy, precision = CALLS[case]
    said = {}
    with prepared(strategy, precision) as engine:
        for name in (*PRIVATE_API[case].names, None):
            if engine._order.place.phase is not Phase.BACKWARD_DONE:
                loss = engine(torch.ones(4, 7)).loss
                engine.backward(loss, num_items=4) if case.startswith("divisor") else engine.backward(loss)
            if name is None:
                act(engine)
                continue
            with renamed(*place(name)) as changed:
                said[name] = refused(act, engine) if changed else "is nowhere in DeepSpeed"
    return said


WORLDS = {case: 4 if case.startswith(("replica-groups", "second-copies", "slices")) else 1 for case in PRIVATE_API}
NOT_REFUSED = ("frees-stage-3", "gathers-stage-3", "partitioned-parameters")
"""Cases without whose names nothing is refused: of what only a CUDA device does (tests/device_sim has one),
and parameters that are not gathered show nothing."""
RENAMED = [(case, name) for case, patch in PRIVATE_API.items() if case not in NOT_REFUSED for name in patch.names]


def said_of(case):
    """What the first rank heard for each name of a case."""
    cases = [each for each in PRIVATE_API if WORLDS[each] == WORLDS[case] and each not in NOT_REFUSED]
    function = {each: call if each in CALLS else meet for each in cases}
    return values(play(tuple((function[each], (each,)) for each in cases), WORLDS[case])[function[case], (case,)])[0]


def test_every_case_of_the_table_has_a_run_or_a_call_that_meets_it():
    assert {*MEETING, *CALLS, *NOT_REFUSED} == {*PRIVATE_API}
    assert not MEETING.keys() & CALLS.keys()


@pytest.mark.parametrize(("case", "name"), RENAMED, ids=lambda each: each.rpartition(":")[2])
def test_without_one_of_its_names_a_case_is_refused_in_one_sentence(case, name):
    said = said_of(case)[name]
    assert said.startswith(f"BackendError: {PRIVATE_API[case].case} needs ")
    assert name.partition(":")[2] in said
    assert PRIVATE_API[case].instead in said


# -- ordinary runs ---------------------------------------------------------------------------------

BF16 = {"bf16": {"precision": "bf16"}}
ORDINARY = {
    "no_shard": BF16,
    "shard_optimizer": {"fp32": {}, **(BF16 if DEEP else {})},
    "shard_grad_op": {"fp32": {}, "offload": {"precision": "bf16", **OFFLOAD}},
    "full_shard": {
        **BF16,
        **({"offload": {"precision": "bf16", "offload": {"optimizer": "cpu", "params": "cpu"}}} if DEEP else {}),
        "recomputed": {"activation_checkpointing": "full"},
    },
}
NEEDED = {"full_shard": ("leaf-gradients",)}
"""Cases that an ordinary run meets, too."""


def ordinary(strategy, others_are_renamed):
    """Losses and norms of the ordinary runs of a strategy."""
    load_deepspeed()
    kept = {place(name) for case in NEEDED.get(strategy, ()) for name in PRIVATE_API[case].names}
    places = {place(name) for patch in PRIVATE_API.values() for name in patch.names} - kept
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UserWarning)  # what stays when an engine is closed
        for package, attribute in sorted(places) if others_are_renamed else ():
            stack.enter_context(renamed(package, attribute))
        return {kind: steps(strategy, sections) for kind, sections in ORDINARY[strategy].items()}


def steps(strategy, sections):
    """Accumulates, clips, and has a frozen layer."""
    torch.manual_seed(5)
    model = Branching()
    model.head.requires_grad_(False)
    training = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.05}
    with unishard.prepare(model, config("deepspeed", strategy, training=training, optimizer=SGD, **sections)) as engine:
        return [(float(loss), step.grad_norm) for loss, step in (one(engine, seed) for seed in range(6))]


def one(engine, seed):
    generator = torch.Generator().manual_seed(10 * seed + my_rank())
    loss = engine(torch.randn(4, 7, generator=generator)).loss
    engine.backward(loss)
    return loss, engine.step()


@pytest.mark.parametrize("strategy", ORDINARY)
def test_an_ordinary_run_trains_the_same_without_any_name_of_the_other_cases(strategy):
    played = play(tuple((ordinary, (each, renames)) for each in ORDINARY for renames in (False, True)))
    expected, found = (values(played[ordinary, (strategy, renames)]) for renames in (False, True))
    assert found == expected
    assert all(norm for rank in found for kind in rank.values() for _, norm in kind[1::2])
