"""`torch.inference_mode()` around an evaluation is `no_grad` to an engine, and the training after it that of plain
torch."""

from __future__ import annotations

import pytest
import torch
from harness import assert_conforms, play, tolerance, values
from harness.training import BACKENDS, MICRO_BATCHES, SPANNING, configured, curve, own_share, prepare, train, windows

from unishard.testing import oracle
from unishard.testing.models import mlp


@torch.inference_mode()
def evaluated(engine, folder):
    """Every kind of call, also of the module itself, with batches that were made in inference mode."""
    made = own_share(1)[0]
    assert all(tensor.is_inference() for tensor in made.values())
    engine.eval()
    losses = [engine.mean(engine(**batch).loss) for batch in engine.batches([made])]
    losses.append(engine.mean(engine.module(**made).loss))
    with engine.lockstep():
        engine(**made)
    name = next(iter(dict(engine.module.named_parameters())))
    before = engine.parameter(name)
    engine.set_parameter(name, before.clone())
    with engine.gathered([name]) as tensors:
        tensors[name].mul_(1)
    assert torch.equal(engine.parameter(name), before)
    if folder:
        engine.load(engine.save(folder), data=False)
        engine.export(f"{folder}/exported")
    engine.train()
    assert not torch.is_grad_enabled()
    return losses


def trained(backend, strategy, precision, first, folder=""):
    """Trains with an evaluation in inference mode before the first update and inside averaged weights, or between two
    updates."""
    with prepare(configured(backend, strategy, precision=precision)) as engine:
        average = engine.ema(0.5)
        done = [] if first else train(engine, own_share(MICRO_BATCHES)[:2])
        with average.weights():
            if first:
                with torch.inference_mode():
                    engine.eval()(**own_share(1)[0])
                    engine.train()
        found = evaluated(engine, folder)
        done += train(engine, own_share(MICRO_BATCHES)[len(done) :])
        return curve(done), found


SCENARIOS = tuple((trained, (*cell, first)) for cell in SPANNING for first in (True, False))


@pytest.mark.parametrize("first", [True, False], ids=["before the first update", "between updates"])
@pytest.mark.parametrize("cell", SPANNING, ids="-".join)
def test_training_after_an_evaluation_in_inference_mode_is_that_of_plain_torch(cell, first):
    wanted = oracle.train(mlp(), windows(), configured("fsdp", cell[1], precision=cell[2]), world=2)
    for found, losses in values(play(SCENARIOS)[trained, (*cell, first)]):
        assert_conforms(found, wanted, tolerance(*cell))
        assert losses[0] == losses[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_is_saved_loaded_and_exported_in_inference_mode(backend, tmp_path):
    scenario = (trained, (backend, "full_shard", "fp32", False, str(tmp_path)))
    wanted = oracle.train(mlp(), windows(), configured("fsdp", "full_shard"), world=2)
    for found, _ in values(play((scenario,))[scenario]):
        assert_conforms(found, wanted, tolerance(backend, "full_shard", "fp32"))
