"""`sharding.reshard_after_forward: 2` on four ranks: backward gathers within pairs, and nothing else changes."""

from __future__ import annotations

import tempfile
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from harness import ACCUMULATION, DEEP, config, configured, curve, own_share, play, train, values

import unishard
from dev.ranks.recording import BLOCK, PARAMETERS, Countable, Recorder
from unishard.testing.conformance import compare
from unishard.testing.models import batch, mlp

WORLD, GROUP = 4, 2
REST = 3 * ACCUMULATION
"""Micro-batches after a checkpoint."""
KEPT = (True, GROUP, WORLD, False)
TRAINED = {
    ("fsdp", "fp32"): KEPT if DEEP else KEPT[:2],
    **(dict.fromkeys((("fsdp", "bf16"), ("deepspeed", "fp32")), (True, GROUP)) if DEEP else {}),
    ("deepspeed", "bf16"): (True, GROUP),
    ("deepspeed", "bf16", "params"): (True, GROUP),
}
"""By backend, precision and what is in host memory: values of `sharding.reshard_after_forward`."""
OFFLOAD = {"": None, "params": {"params": "cpu"}}


def built(frozen):
    model = mlp()
    model.blocks[0].requires_grad_(not frozen)
    model.head.bias.requires_grad_(not frozen)
    return model


def prepared(backend, kept, precision="fp32", frozen=False, **sections):
    cfg = configured(backend, {"strategy": "full_shard", "reshard_after_forward": kept}, precision, **sections)
    return unishard.prepare(built(frozen), cfg)


def evaluated(engine):
    engine.eval()
    with torch.no_grad():
        logits = engine(**batch("mlp", 500, 4)).logits.float().tolist()
    engine.train()
    return logits


def trained(kept, backend, precision, place=""):
    """The curve, outputs, an evaluation in between, and what is read of a parameter when units hold shards of pairs."""
    with prepared(
        backend, kept, precision, frozen=(backend, precision) == ("deepspeed", "bf16"), offload=OFFLOAD[place]
    ) as engine:
        first = curve(train(engine, own_share(2 * ACCUMULATION)))
        logits, held = evaluated(engine), engine.weights.norms()
        return first, logits, held, curve(train(engine, own_share(2 * ACCUMULATION)))


def written(kept):
    """On DeepSpeed, outputs and updates after weights were written in every way, each after a forward that has left
    shards in pairs."""
    found = []
    with prepared("deepspeed", kept, frozen=True) as engine, tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        train(engine, own_share(ACCUMULATION))
        engine.save(folder[0])
        for name in ("blocks.1.up.weight", "blocks.0.up.weight"):
            evaluated(engine)
            engine.weights.write(name, torch.full_like(engine.weights.read(name), 0.01))
            found.append(evaluated(engine))
        train(engine, own_share(ACCUMULATION))
        evaluated(engine)
        engine.load(folder[0])
        found.append(evaluated(engine))
        return found, curve(train(engine, own_share(ACCUMULATION)))


def saved(folder):
    """On DeepSpeed, saves where every unit has a shard in pairs; the rest of that run."""
    with prepared("deepspeed", GROUP, frozen=True) as engine:
        train(engine, own_share(ACCUMULATION))
        evaluated(engine)
        engine.save(folder)
        return curve(train(engine, own_share(REST)))


def resumed(folder, kept):
    """The same rest from the checkpoint, in an engine whose units have shards of other weights."""
    with prepared("deepspeed", kept, frozen=True) as engine:
        engine.weights.write("blocks.0.up.weight", torch.zeros_like(engine.weights.read("blocks.0.up.weight")))
        evaluated(engine)
        engine.load(folder, verify="bits")
        return curve(train(engine, own_share(REST)))


def resumed_by_half(folder):
    """The same rest on half as many ranks with twice the micro-batches each."""
    training = {"gradient_accumulation_steps": 2 * ACCUMULATION, "gradient_clipping": 0.5}
    with unishard.prepare(built(frozen=True), config("deepspeed", training=training)) as engine:
        engine.load(folder, verify="bits")
        return curve(train(engine, own_share(2 * REST)))


def side_by_side(size):
    """Updates of two engines at once, of which one has groups by DeepSpeed's own key."""
    native = {"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": size}}}
    with prepared("deepspeed", True, native=native) as one, prepared("deepspeed", True) as other:
        return [curve(train(engine, own_share(ACCUMULATION))) for engine in (one, other, one)]


def inferred(kept):
    """Outputs of a model that is only evaluated, twice, and after a parameter was written."""
    cfg = config("deepspeed", {"strategy": "full_shard", "reshard_after_forward": kept})
    with unishard.prepare(mlp(), cfg, train=False) as engine, torch.no_grad():
        found = [engine(**batch("mlp", 500, 4)).logits.tolist() for _ in range(2)]
        engine.weights.write("head.bias", torch.ones(11))
        return [*found, engine(**batch("mlp", 500, 4)).logits.tolist()]


def gathered_in_a_window(own):
    """On DeepSpeed, by micro-batch of the window after the traced one."""
    own = {"strategy": "full_shard", "reshard_after_forward": own, "units": ["Block"]}
    sections = {"communication": {"prefetch_bucket_size": 0}, "training": {"gradient_accumulation_steps": 2}}
    found = []
    with unishard.prepare(Countable(), config("deepspeed", own, **sections)) as engine:
        for _ in range(2 * ACCUMULATION):
            with InGroups() as forward:
                loss = engine(torch.randn(2, 4), torch.arange(2)).loss
            with InGroups() as backward:
                engine.backward(loss)
            with InGroups() as step:
                engine.step()
            found.append([dict(recorder.moved) for recorder in (forward, backward, step)])
    return found


def gathered(kept):
    """Elements of all-gathers by phase and size of the group."""
    sharding = {"strategy": "full_shard", "units": ["Block"], "reshard_after_forward": kept}
    found = {}
    with unishard.prepare(Countable(), config("fsdp", sharding)) as engine:
        for phase in ("forward", "backward"):
            with InGroups() as recorder:
                if phase == "forward":
                    loss = engine(torch.randn(2, 4), torch.arange(2)).loss
                else:
                    engine.backward(loss)
            found[phase] = dict(recorder.moved)
        engine.step()
    return found


class InGroups(Recorder):
    """All-gathers by the number of ranks among which they gather."""

    def __init__(self):
        super().__init__()
        self.moved = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::_allgather_base_":
            self.moved[args[0].numel() // args[1].numel()] += args[0].numel()
        return super().__torch_dispatch__(func, types, args, kwargs)


SCENARIOS = (
    *((trained, (kept, *cell)) for cell, some in TRAINED.items() for kept in some),
    *((written, (kept,)) for kept in KEPT[:2]),
    *((gathered, (kept,)) for kept in KEPT),
    *((gathered_in_a_window, (kept,)) for kept in KEPT[:2]),
    *((side_by_side, (size,)) for size in (1, GROUP) if DEEP),
    *((inferred, (kept,)) for kept in KEPT[:2]),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("reshard_group"))


@pytest.fixture(scope="module")
def played(folder):
    """Outcomes of a scenario; all of them are played in the same ranks."""
    scenarios = (*SCENARIOS, (saved, (folder,)), *((resumed, (folder, kept)) for kept in KEPT[:2]))
    return lambda scenario, *arguments: play(scenarios, WORLD)[scenario, arguments]


@pytest.mark.parametrize("cell", TRAINED, ids="-".join)
def test_a_smaller_group_after_forward_trains_bit_for_bit_the_same(played, cell):
    first, *others = TRAINED[cell]
    for kept in others:
        assert values(played(trained, kept, *cell)) == values(played(trained, first, *cell))


def test_what_is_written_between_forwards_is_what_the_next_one_computes_with(played):
    assert values(played(written, GROUP)) == values(played(written, True))


@pytest.mark.parametrize("kept", KEPT[:2])
def test_a_run_that_is_resumed_goes_on_as_the_one_that_did_not_stop(played, folder, kept):
    assert values(played(resumed, folder, kept)) == values(played(saved, folder))


def test_a_run_that_is_resumed_on_fewer_ranks_goes_on_as_the_one_that_did_not_stop(played, folder):
    expected = values(played(saved, folder))[0]
    for found in values(play(((resumed_by_half, (folder,)),), WORLD // 2)[resumed_by_half, (folder,)]):
        assert max(compare(found, expected)) < 1e-5


@pytest.mark.deep
def test_deepspeeds_own_key_leaves_another_engine_alone(played):
    assert values(played(side_by_side, GROUP)) == values(played(side_by_side, 1))


def test_a_model_that_is_only_evaluated_is_gathered_in_groups_too(played):
    assert values(played(inferred, GROUP)) == values(played(inferred, True))


def test_backward_gathers_within_the_smaller_group(played):
    units, whole = 2 * BLOCK, {WORLD: PARAMETERS}  # the last unit is kept
    for kept, backward in ((True, {WORLD: units}), (GROUP, {GROUP: units}), (WORLD, {WORLD: units}), (False, {})):
        for found in values(played(gathered, kept)):
            assert found == {"forward": whole, "backward": backward}


def test_deepspeed_gathers_among_all_ranks_only_in_the_first_forward_of_a_window(played):
    whole, near = {WORLD: PARAMETERS}, {GROUP: PARAMETERS}
    for found in values(played(gathered_in_a_window, True)):
        assert found == [[whole, whole, {}]] * 4
    for found in values(played(gathered_in_a_window, GROUP)):
        assert found == [[whole, near, {}], [near, near, {}]] * 2
