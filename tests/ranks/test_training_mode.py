"""What is trained is in training mode from the first step on, as `prepare` says; and the engine knows its rank."""

from __future__ import annotations

import contextlib
import io
import logging
from itertools import product

import torch
from harness import BACKENDS, EACH, config, heard, in_ranks, my_rank
from torch import nn

import unishard


class Body(nn.Module):
    """Two dropouts and a normalization with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))

    def forward(self, x):
        """Return a loss."""
        return self.second(self.norm(self.first(x))).square().mean()


SAID = {
    "none": [],
    "all": ["Body was in evaluation mode; prepare has put it in training mode"],
    "parts": [
        "4 of 8 modules of Body were in evaluation mode, such as first; prepare has put them in training mode; "
        "call .eval() on a part after prepare to keep it in evaluation mode, such as a frozen BatchNorm",
    ],
}


@in_ranks(cells=tuple(product(BACKENDS, SAID)), in_turn=True)
def test_prepare_puts_what_is_trained_in_training_mode_and_says_so_on_one_rank(backend, which):
    model = Body()
    for part in {"none": (), "all": (model,), "parts": (model.first, model.norm)}[which]:
        part.eval()
    logging.getLogger("unishard").setLevel(logging.INFO)
    warning = heard(level=logging.WARNING)
    with heard() as lines, warning as warned, unishard.prepare(model, config(backend)) as engine:
        assert [name for name, part in engine.module.named_modules() if not part.training] == []
        engine.backward(engine(torch.ones(2, 4)))
        said = [[line for line in heard_of if "in evaluation mode" in line] for heard_of in (lines, warned)]
        assert engine.step().updated
    main = my_rank() == 0
    assert said == [SAID[which] * main, SAID[which] * (main and which == "parts")]


@in_ranks(cells=EACH, in_turn=True)
def test_a_part_put_in_evaluation_mode_after_prepare_stays_there(backend):
    torch.manual_seed(0)
    model = Body()
    with unishard.prepare(model, config(backend)) as engine:
        engine.module.norm.eval()
        before = engine.module.norm.running_mean.clone()
        engine.backward(engine(torch.randn(2, 4)))
        engine.step()
        assert torch.equal(engine.module.norm.running_mean, before)
        assert engine.module.first.training


@in_ranks(cells=EACH, in_turn=True)
def test_an_engine_knows_its_rank_and_prints_once(backend):
    """With a progress bar and without."""
    printed = io.StringIO()
    with unishard.prepare(Body(), config(backend)) as engine, contextlib.redirect_stdout(printed):
        engine.print("loss", 1, sep="=")
        for batch in engine.batches([torch.ones(2, 4)], progress=True):
            engine.backward(engine(batch))
            engine.step()
            engine.print("one update")
    main = my_rank() == 0
    assert (engine.rank, engine.world_size, engine.is_main) == (my_rank(), 2, main)
    assert printed.getvalue() == "loss=1\none update\n" * main
