"""What cannot be prepared is one clear error on every rank, and no hang."""

from __future__ import annotations

import pytest
import torch
from harness import BACKENDS, config, error, my_rank, play, prepare
from torch import nn

import unishard
from unishard.contract import registry
from unishard.testing.models import Mlp, mlp


def different_configs(backend):
    cfg = config(
        backend, training={"gradient_accumulation_steps": 1 + my_rank()}, precision=("fp32", "bf16")[my_rank()]
    )
    prepare(cfg)


def different_units(backend):
    """Alone, rank 1's would be another error."""
    prepare(config(backend, {"strategy": "full_shard", "units": [("Block", "Blok")[my_rank()]]}))


def different_backends(backend):
    prepare(config((backend, "nosuch")[my_rank()]))


def different_models(backend):
    unishard.prepare(Mlp(hidden=23 + 2 * my_rank()), config(backend))


def frozen_on_one_rank(backend):
    model = mlp()
    model.requires_grad_(my_rank() == 0)
    unishard.prepare(model, config(backend))


def units_too_small(backend):
    prepare(config(backend, {"strategy": "full_shard", "min_unit_params": 10**6}))


def double_precision_model(backend):
    unishard.prepare(mlp().double(), config(backend))


def wrapped_already(backend):
    unishard.prepare(nn.parallel.DistributedDataParallel(mlp()), config(backend))


def different_optimizers(backend):
    model = mlp()
    rate = 0.1 + my_rank()
    unishard.prepare(model, config(backend, optimizer=None), optimizer=torch.optim.SGD(model.parameters(), lr=rate))


def optimizer_on_one_rank(backend):
    model = mlp()
    unishard.prepare(
        model, config(backend, optimizer=None), torch.optim.SGD(model.parameters(), lr=0.1) if my_rank() else None
    )


def no_data_on_rank_0(backend):
    with torch.device(("meta", "cpu")[my_rank()]):
        model = Mlp()
    unishard.prepare(model, config(backend))


def a_buffer_without_data(backend):
    model = mlp()
    model.center = model.center.to("meta")
    unishard.prepare(model, config(backend))


def trained_on_one_rank(backend):
    unishard.prepare(mlp(), config(backend), train=bool(my_rank()))


def an_optimizer_for_what_is_not_trained(backend):
    unishard.prepare(mlp(), config(backend), optimizer=torch.optim.SGD, train=False)


def not_installed(backend):
    original = registry.find_spec
    registry.find_spec = lambda package: None
    try:
        prepare(config(backend))
    finally:
        registry.find_spec = original


REFUSED = {
    different_configs: (
        "RankMismatchError",
        "precision.compute: rank 0 has 'fp32', rank 1 has 'bf16'",
        "gradient_accumulation_steps: rank 0 has 1, rank 1 has 2",
    ),
    different_units: ("RankMismatchError", "sharding.units: rank 0 has ['Block'], rank 1 has ['Blok']"),
    different_backends: ("RankMismatchError", "rank 1 has 'nosuch'"),
    different_models: (
        "RankMismatchError",
        "model",
        "inp.weight: rank 0 has '(23, 13) torch.float32', rank 1 has '(25, 13) torch.float32'",
    ),
    frozen_on_one_rank: ("RankMismatchError", "different models", "rank 1 has '(23, 13) torch.float32 frozen'"),
    units_too_small: ("ModelError", "1,000,000 is larger than every unit", "blocks.0 (Block, 1,809)"),
    double_precision_model: ("ModelError", "trainable parameters must be fp32, bf16 or fp16", "call model.float()"),
    wrapped_already: ("ModelError", "DistributedDataParallel is already wrapped; pass model.module instead"),
    different_optimizers: (
        "RankMismatchError",
        "different optimizers",
        "lr of group 0: rank 0 has 0.1, rank 1 has 1.1",
    ),
    optimizer_on_one_rank: ("RankMismatchError", "optimizer: rank 0 has 'that of the config', rank 1 has 'SGD'"),
    no_data_on_rank_0: (
        "ModelError",
        "parameter inp.weight of Mlp is on the meta device and has no data",
        "inside unishard.init(cfg)",
    ),
    a_buffer_without_data: ("ModelError", "buffer center of Mlp is on the meta device"),
    trained_on_one_rank: ("RankMismatchError", "train: rank 0 has False, rank 1 has True"),
    an_optimizer_for_what_is_not_trained: ("ConfigError", "optimizer: was passed to prepare with train=False"),
    not_installed: ("BackendError", "pip install 'unishard["),
}


IN_TURNS = tuple((case, (BACKENDS[turn % 2],)) for turn, case in enumerate(REFUSED))
"""Of what no engine decides, on the engines in turn."""


@pytest.mark.parametrize("scenario", IN_TURNS, ids=lambda scenario: scenario[0].__name__)
def test_what_cannot_be_prepared_is_one_clear_error_on_every_rank(scenario):
    case, _ = scenario
    raised = error(play(IN_TURNS)[scenario])
    kind, *said = REFUSED[case]
    assert raised.startswith(f"{kind}: ")
    for part in said:
        assert part in raised
