"""`precision.cast_inputs`: which inputs are cast to a 16-bit compute dtype, and the warning about rounded whole
numbers."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from harness import BACKENDS, PAIRS, config, play, values
from torch import nn

import unishard

TIMES = torch.tensor([1.3, 501.3, 997.0, 998.6])


class Diffusion(nn.Module):
    """Embeds a floating-point timestep, which it takes beside the noisy sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.sample, self.time = nn.Linear(8, 8), nn.Linear(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(2))

    def forward(self, sample, timestep, scale=None):
        self.seen = sample.dtype, timestep.dtype
        frequencies = torch.exp(-math.log(10000) * torch.arange(8, dtype=torch.float32) / 8)
        angles = timestep.float()[:, None] * frequencies
        hidden = self.sample(sample) + self.time(torch.cat([angles.sin(), angles.cos()], -1).to(sample.dtype))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def predicted(backend, strategy, cast_inputs, train):
    """What the model has seen and returned, and the warnings of two forwards."""
    cfg = config(
        backend,
        strategy,
        precision={"compute": "bf16", "cast_inputs": cast_inputs},
        optimizer=None if not train else {"lr": 0.1},
    )
    with (
        warnings.catch_warnings(record=True) as caught,
        unishard.prepare(Diffusion(), cfg, train=train) as engine,
        torch.no_grad(),
    ):
        warnings.simplefilter("always")
        sample = torch.ones(4, 8, dtype=torch.bfloat16 if cast_inputs is False else torch.float32)
        for _ in range(2):
            out = engine(sample, timestep=TIMES).float()
        said = [str(each.message) for each in caught if each.category is RuntimeWarning]
        return engine.module.seen, out, said


def of(name):
    return lambda *arguments: predicted(
        *arguments[:-1], ["sample"] if arguments[-1] == "named" else arguments[-1] == "all", name
    )


def trained(*arguments):
    return of(True)(*arguments)


def evaluated(*arguments):
    return of(False)(*arguments)


PLAYED = (
    *((trained, (*cell, which)) for cell in PAIRS for which in ("all", "named", "none")),
    *((evaluated, (backend, strategy, "named")) for backend in BACKENDS for strategy in ("full_shard", "no_shard")),
)


@pytest.mark.parametrize("cell", PAIRS, ids="-".join)
def test_a_named_argument_is_cast_and_a_timestep_is_not(cell):
    played = play(PLAYED, world=1)
    with torch.no_grad():
        plain = Diffusion()(torch.ones(4, 8), TIMES)
    low, full = torch.bfloat16, torch.float32
    for which, seen, close in (("all", (low, low), False), ("named", (low, full), True), ("none", (low, full), True)):
        ((found, out, said),) = values(played[trained, (*cell, which)])
        assert found == seen
        assert bool((out - plain).norm() / plain.norm() < 0.02) is close
        assert len(said) == (which == "all"), "once, although the model ran twice"
    assert values(played[trained, (*cell, "all")])[0][2] == [
        "precision.cast_inputs rounds whole numbers of timestep, an argument of Diffusion.forward: 997 becomes 996; if "
        "they are timesteps or positions, name only the other arguments in precision.cast_inputs, or pass integers"
    ]


def test_inference_casts_the_same_arguments():
    played = play(PLAYED, world=1)
    outs = [values(played[function, arguments])[0] for function, arguments in PLAYED if function is evaluated]
    assert {seen for seen, *_ in outs} == {(torch.bfloat16, torch.float32)}
    assert all(torch.equal(out, outs[0][1]) for _, out, _ in outs)
