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


def no_parameters(backend):
    unishard.prepare(nn.Sequential(nn.ReLU()), config(backend))


def all_frozen(backend):
    unishard.prepare(mlp().requires_grad_(False), config(backend))


def no_such_unit(backend):
    prepare(config(backend, {"strategy": "full_shard", "units": ["LlamaDecoderLayer"]}))


def units_too_small(backend):
    prepare(config(backend, {"strategy": "full_shard", "min_unit_params": 10**6}))


def other_global_batch(backend):
    prepare(config(backend, training={"gradient_accumulation_steps": 3, "global_batch_size": 16}))


def double_precision_model(backend):
    unishard.prepare(mlp().double(), config(backend))


def optimizer_given_twice(backend):
    unishard.prepare(
        mlp(), config(backend, optimizer={"name": "sgd", "lr": 0.1}), optimizer=lambda params: torch.optim.SGD(params)
    )


def wrapped_already(backend):
    unishard.prepare(nn.parallel.DistributedDataParallel(mlp()), config(backend))


def prepared_twice(backend):
    model = mlp()
    unishard.prepare(model, config(backend, "no_shard")).close()
    unishard.prepare(model, config(backend, "no_shard"))


def a_path_for_a_config(backend):
    unishard.prepare(mlp(), "configs/llama_tiny.yaml")


def an_optimizer_of_another_model(backend):
    unishard.prepare(mlp(), config(backend, optimizer=None), optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1))


def different_optimizers(backend):
    model = mlp()
    rate = 0.1 + my_rank()
    unishard.prepare(model, config(backend, optimizer=None), optimizer=torch.optim.SGD(model.parameters(), lr=rate))


def optimizer_on_one_rank(backend):
    model = mlp()
    unishard.prepare(
        model, config(backend, optimizer=None), torch.optim.SGD(model.parameters(), lr=0.1) if my_rank() else None
    )


def a_pattern_without_match(backend):
    unishard.prepare(mlp(), config(backend, optimizer={"weight_decay": 0.1, "no_decay": ["LayerNorm"]}))


def scheduler_given_twice(backend):
    cfg = config(backend, scheduler={"name": "constant"})
    unishard.prepare(mlp(), cfg, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))


def a_scheduler_that_needs_a_metric(backend):
    unishard.prepare(mlp(), config(backend), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


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
    no_parameters: ("ModelError", "Sequential has no parameters"),
    all_frozen: ("ModelError", "parameters of Mlp are frozen; unfreeze the ones to train"),
    no_such_unit: ("ModelError", "no module of class LlamaDecoderLayer in Mlp", "Block (x3, 1,809 parameters each)"),
    units_too_small: ("ModelError", "1,000,000 is larger than every unit", "blocks.0 (Block, 1,809)"),
    other_global_batch: (
        "ConfigError",
        "training.global_batch_size",
        "is 16, but micro_batch_size 2 x gradient_accumulation_steps 3 x 2 ranks is 12",
    ),
    double_precision_model: ("ModelError", "trainable parameters must be fp32, bf16 or fp16", "call model.float()"),
    optimizer_given_twice: (
        "ConfigError",
        "optimizer: is in the config and was also passed to prepare; remove one of them",
    ),
    wrapped_already: ("ModelError", "DistributedDataParallel is already wrapped; pass model.module instead"),
    prepared_twice: ("ModelError", "this Mlp was already prepared; call engine.framework.release() on its engine"),
    a_path_for_a_config: ("ConfigError", "expected a unishard.Config, got str; load one with unishard.load(path)"),
    an_optimizer_of_another_model: ("ConfigError", "optimizer: SGD has 25 parameters that are not in Mlp"),
    different_optimizers: (
        "RankMismatchError",
        "different optimizers",
        "lr of group 0: rank 0 has 0.1, rank 1 has 1.1",
    ),
    optimizer_on_one_rank: ("RankMismatchError", "optimizer: rank 0 has 'that of the config', rank 1 has 'SGD'"),
    a_pattern_without_match: (
        "ConfigError",
        "optimizer.no_decay: 'LayerNorm' matches no parameter; write part of a name, such as inp",
    ),
    scheduler_given_twice: (
        "ConfigError",
        "scheduler: is in the config and was also passed to prepare; remove one of them",
    ),
    a_scheduler_that_needs_a_metric: ("ConfigError", "scheduler: ReduceLROnPlateau needs a metric"),
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
