"""`torch.inference_mode()` around an evaluation is `no_grad` to an engine, and the training after it that of plain
torch."""

from __future__ import annotations

import torch
from harness import EACH, assert_conforms, in_ranks, tolerance
from harness.training import MICRO_BATCHES, SPANNING, configured, curve, own_share, prepare, train, windows

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
    before = engine.weights.read(name)
    engine.weights.write(name, before.clone())
    with engine.weights.gathered([name]) as tensors:
        tensors[name].mul_(1)
    assert torch.equal(engine.weights.read(name), before)
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
        average = engine.weights.average(0.5)
        done = [] if first else train(engine, own_share(MICRO_BATCHES)[:2])
        with average.weights():
            if first:
                with torch.inference_mode():
                    engine.eval()(**own_share(1)[0])
                    engine.train()
        found = evaluated(engine, folder)
        done += train(engine, own_share(MICRO_BATCHES)[len(done) :])
        return curve(done), found


def judged(backend, strategy, precision, first, folder=""):
    wanted = oracle.train(mlp(), windows(), configured("fsdp", strategy, precision=precision), world=2)
    found, losses = trained(backend, strategy, precision, first, folder)
    assert_conforms(found, wanted, tolerance(backend, strategy, precision))
    assert losses[0] == losses[1]


@in_ranks(cells=tuple((*cell, first) for cell in SPANNING for first in (True, False)))
def test_training_after_an_evaluation_in_inference_mode_is_that_of_plain_torch(*cell):
    judged(*cell)


@in_ranks(cells=EACH)
def test_a_run_is_saved_loaded_and_exported_in_inference_mode(backend, root):
    judged(backend, "full_shard", "fp32", False, root)
