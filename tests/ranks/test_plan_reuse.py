"""A second save of an engine is not planned again, unless something has changed in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import BACKENDS, config, own_share, play, prepare, train, values

from unishard.checkpoint import planning
from unishard.checkpoint.tensor_reader import Tensors


def saved(backend, where, background):
    """For each save: how often rank 0 planned the model, and whether the checkpoint holds the weights of that
    moment."""
    planned, found, made = [], [], planning.Assignment

    def plan(everyone, chunk):
        done = made(everyone, chunk)
        planned.append(any(tensor.name.startswith("model.") for tensor in done.tensors))
        return done

    planning.Assignment = plan
    try:
        with prepare(config(backend, checkpoint={"async_save": background}, optimizer={"lr": 0.1})) as engine:
            for step in range(4):
                folder = engine.save(Path(where))
                engine.wait()
                weights = {name: engine.weights.read(name).cpu() for name, _ in engine.module.named_parameters()}
                stored = Tensors(folder)
                equal = all(torch.equal(stored.full(f"model.{name}"), value) for name, value in weights.items())
                states = sum(name.startswith("optim.state.") for name in stored)
                found.append((sum(planned), states > 0, equal))
                del planned[:]
                train(engine, own_share(1) if step < 2 else [])
            assert engine.load(folder, verify="bits").step == 2
    finally:
        planning.Assignment = made
    return found


@pytest.mark.parametrize(
    ("backend", "background"),
    [
        pytest.param(backend, background, marks=[pytest.mark.deep] * (background is (backend == "fsdp")))
        for backend in BACKENDS
        for background in (False, True)
    ],
)
def test_a_save_is_planned_only_after_a_change(backend, background, tmp_path_factory):
    place = tmp_path_factory.mktemp("plans")
    first, other = values(play(((saved, (backend, str(place), background)),))[saved, (backend, str(place), background)])
    # The optimizer's state is there from the start, or appears with the first update.
    assert [save[0] for save in first] in ([1, 1, 0, 0], [1, 0, 0, 0])
    assert first[0][0] + first[1][0] == 1 + (first[0][1] != first[1][1]), "planned again exactly if state appears"
    assert all(save[2] for save in (*first, *other))
    assert [save[0] for save in other] == [0] * 4
