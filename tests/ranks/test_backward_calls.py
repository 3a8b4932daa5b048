"""`training.backward_calls`: the parts of a micro-batch's loss are sent back one by one, as in one process."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from harness import PAIRS, checked, everyones, in_ranks, my_rank, own_share, prepare, refused
from torch.nn.utils import clip_grad_norm_
from torch.testing import assert_close

from unishard.testing.models import mlp

WEIGHTS = (1.0, 0.3)
"""Of the parts of a loss."""
ACCUMULATION, UPDATES, WORLD, CLIP = 2, 3, 2, 0.5
PER_UPDATE = ACCUMULATION * len(WEIGHTS)


def config(backend, strategy, **sections):
    training = {"gradient_accumulation_steps": ACCUMULATION, "backward_calls": len(WEIGHTS), "gradient_clipping": CLIP}
    return checked(backend, strategy, training=training, **sections)


def trained(engine, counted):
    """Mean loss and norm of each update."""
    data, found = iter(own_share(PER_UPDATE * UPDATES)), []
    for _ in range(UPDATES):
        total = 0.0
        for _ in range(ACCUMULATION):
            for weight in WEIGHTS:
                batch = next(data)
                loss, items = weight * engine(**batch).loss, len(batch["labels"])
                engine.backward(*((loss * items, items) if counted else (loss,)))
                total += engine.mean(loss) / ACCUMULATION
            step = engine.step()
        assert step.updated
        found.append((total, step.grad_norm))
    return found


def oracle(counted):
    model, found = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for update in range(UPDATES):
        micro_batches = everyones(update * PER_UPDATE, (update + 1) * PER_UPDATE, world=WORLD)
        losses = []
        for place, batch in enumerate(micro_batches):
            loss = WEIGHTS[place // WORLD % len(WEIGHTS)] * model(**batch).loss / (ACCUMULATION * WORLD)
            (loss / len(WEIGHTS) if counted else loss).backward()
            losses.append(loss.item())
        norm = clip_grad_norm_(model.parameters(), CLIP).item()
        optimizer.step()
        optimizer.zero_grad()
        found.append((sum(losses), norm))
    return found


@in_ranks(world=WORLD, cells=PAIRS)
def test_losses_norms_and_logged_losses_are_those_of_the_sum(backend, strategy, root):
    found, logged = [], []
    for counted in (False, True):
        folder = f"{root}/{counted}"
        with prepare(config(backend, strategy, logging={"to": ["jsonl"], "dir": folder, "every_steps": 1})) as engine:
            found.append(trained(engine, counted))
        if my_rank() == 0:  # which writes the log
            logged.append([json.loads(line)["loss"] for line in Path(folder, "log.jsonl").read_text().splitlines()])
    assert_close(found, [oracle(False), oracle(True)], rtol=1e-5, atol=0)
    plain, counted = ([loss for loss, _ in losses] for losses in found)
    # With items the mean is over those of both parts.
    expected = [plain, [loss / len(WEIGHTS) for loss in counted]] if my_rank() == 0 else []
    assert_close(logged, expected, rtol=1e-5, atol=0)


@in_ranks(cells=(("fsdp", "full_shard"), ("deepspeed", "shard_grad_op")))
def test_a_step_that_comes_too_early_and_a_save_between_the_parts_are_refused(backend, strategy, root):
    batch = own_share(1)[0]
    with prepare(config(backend, strategy)) as engine:
        engine.backward(engine(**batch).loss)
        early = refused(engine.step)
        inside = refused(engine.save, root)
        engine.discard()
        again = [engine.backward(engine(**batch).loss) for _ in WEIGHTS]
        third = refused(engine.backward, torch.zeros((), requires_grad=True))
        counts = engine.step().updated
        engine.backward(engine(**batch).loss)
        without = refused(engine.backward, torch.zeros((), requires_grad=True))
    assert "1 of 2 backward calls" in early
    assert "inside an accumulation window" in inside
    assert "set training.backward_calls to how many" in third
    assert "needs a forward of its own" in without
    assert again == [None, None]
    assert not counts
