"""`sharding.reshard_after_forward: 2` on four ranks: backward gathers within pairs, and nothing else changes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from conforming import MICRO_BATCHES, configured
from playing import config, curve, error, own_share, play, train, values
from recording import BLOCK, PARAMETERS, Countable, Recorder

import unishard
from unishard.testing.models import batch, mlp

WORLD, GROUP = 4, 2
KEPT = (True, GROUP, WORLD, False)
TRAINED = {"fp32": KEPT, "bf16": (True, GROUP)}


def trained(precision, kept):
    """The curve, outputs, an evaluation in between, and what is read of a parameter when units hold shards of pairs."""
    sharding = {"strategy": "full_shard", "reshard_after_forward": kept}
    with unishard.prepare(mlp(), configured("fsdp", sharding, precision)) as engine:
        first = curve(train(engine, own_share(MICRO_BATCHES)))
        engine.eval()
        with torch.no_grad():
            logits = engine(**batch("mlp", 500, 4)).logits.float().tolist()
        held = engine.parameter_norms()
        engine.train()
        return first, logits, held, curve(train(engine, own_share(MICRO_BATCHES)))


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


def on_deepspeed():
    unishard.prepare(mlp(), config("deepspeed", {"strategy": "full_shard", "reshard_after_forward": GROUP}))


def of_three():
    unishard.prepare(mlp(), config("fsdp", {"strategy": "full_shard", "reshard_after_forward": 3}))


SCENARIOS = (
    *((trained, (precision, kept)) for precision, some in TRAINED.items() for kept in some),
    *((gathered, (kept,)) for kept in KEPT),
    (on_deepspeed, ()),
    (of_three, ()),
)


def played(scenario, *arguments):
    return play(SCENARIOS, WORLD)[scenario, arguments]


@pytest.mark.parametrize("precision", TRAINED)
def test_a_smaller_group_after_forward_trains_bit_for_bit_the_same(precision):
    expected = values(played(trained, precision, True))
    for kept in TRAINED[precision][1:]:
        assert values(played(trained, precision, kept)) == expected


def test_backward_gathers_within_the_smaller_group():
    units, whole = 3 * BLOCK, {WORLD: PARAMETERS}
    for kept, backward in ((True, {WORLD: units}), (GROUP, {GROUP: units}), (WORLD, {WORLD: units}), (False, {})):
        for found in values(played(gathered, kept)):
            assert found == {"forward": whole, "backward": backward}


def test_deepspeed_and_a_group_that_does_not_divide_the_ranks_are_refused():
    assert "sharding.reshard_after_forward" in (found := error(played(on_deepspeed)))
    assert "write true or false, or hybrid_shard with group_size" in found
    assert "is 3, which does not divide the 4 ranks that share one copy; write 2, true or false" in error(played(of_three))
