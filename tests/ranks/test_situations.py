"""Models and loops off the beaten path: frozen and tied parameters, parameter groups, two engines at once, evaluation
before a step."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from conforming import ACCUMULATION, MICRO_BATCHES, UPDATES, assert_conforms, configured, tolerance, windows
from playing import SPANNING, config, curve, error, everyones, own_share, play, prepare, train, values
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils.parametrize import register_parametrization

import unishard
from unishard.testing import oracle
from unishard.testing.models import MlpOutput, llama, mlp

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16}
CELLS = SPANNING
everywhere = pytest.mark.parametrize("cell", CELLS, ids="-".join)


def played(scenario, cell, cells=CELLS):
    """What both ranks returned."""
    return values(play(tuple((scenario, cell) for cell in cells))[scenario, cell])


# -- frozen parameters
# ------------------------------------------------------------------------------------------------------------


def frozen_in_part():
    """The first block, and in every other the biases."""
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not (name.startswith("blocks.0.") or name.endswith("down.bias"))
    return model


def held(parameter):
    """A copy of what this rank keeps of a parameter."""
    with torch.no_grad():
        part = parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)
        return part.detach().clone()


def frozen(backend, strategy, precision):
    with unishard.prepare(frozen_in_part(), configured(backend, strategy, precision)) as engine:
        parameters = dict(engine.module.named_parameters())
        before = {name: held(parameter) for name, parameter in parameters.items()}
        with torch.no_grad():
            block = engine.module.blocks[1](torch.linspace(-1, 1, 46, dtype=COMPUTE[precision]).view(2, 23))
        trained = curve(train(engine, own_share(MICRO_BATCHES)))
        after = {name: held(parameter) for name, parameter in parameters.items()}
        placement = engine.placement()
        return {
            "block": block.float(),
            "curve": trained,
            "moved": {name for name in parameters if not torch.equal(before[name], after[name])},
            "formats": {after[name].dtype for name, parameter in parameters.items() if not parameter.requires_grad},
            "masters": placement.master_numel,
            "bytes": placement.param_bytes,
        }


@everywhere
def test_a_frozen_parameter_does_not_move_and_has_no_master(cell):
    backend, strategy, precision = cell
    model = frozen_in_part()
    everything = sum(parameter.numel() for parameter in model.parameters())
    learning = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    ranks = played(frozen, cell)
    wanted = oracle.train(model, windows(), configured("fsdp", strategy, precision), world=2)
    for found in ranks:
        assert_conforms(found["curve"], wanted, tolerance(*cell))
    assert set.union(*(found["moved"] for found in ranks)) == set(learning)
    # DeepSpeed computes with the tensors that it keeps; FSDP2 keeps what it was given and gathers in the compute
    # format.
    low = backend == "deepspeed" and precision == "bf16"
    assert [found["formats"] for found in ranks] == [{torch.bfloat16 if low else torch.float32}] * 2
    padding = 2 * len(list(model.parameters()))  # stage 3 divides each parameter evenly
    copies = 2 if strategy == "no_shard" else 1
    masters = sum(found["masters"] for found in ranks)
    assert copies * sum(learning.values()) <= masters <= copies * sum(learning.values()) + padding
    # ZeRO 1 and 2 keep whole parameters on each rank.
    copies = 1 if strategy == "full_shard" or (backend == "fsdp" and strategy != "no_shard") else 2
    size = 2 if low else 4
    kept = sum(found["bytes"] for found in ranks)
    assert copies * everything * size <= kept <= (copies * everything + padding) * size


@everywhere
def test_a_block_runs_before_the_model_does(cell):
    with torch.no_grad():
        wanted = mlp().blocks[1](torch.linspace(-1, 1, 46).view(2, 23))
    for found in played(frozen, cell):
        assert torch.allclose(found["block"], wanted, atol=1e-6 if cell[2] == "fp32" else 3e-2)


# -- tied parameters, parameter groups
# --------------------------------------------------------------------------------------------


def tied(backend, strategy, precision):
    cfg = configured(backend, strategy, precision, optimizer={"name": "adamw", "lr": 3e-3})
    with unishard.prepare(llama(tie_word_embeddings=True), cfg) as engine:
        trained = curve(train(engine, own_share(MICRO_BATCHES, "llama")))
        return trained, engine.module.lm_head.weight is engine.module.model.embed_tokens.weight


@everywhere
def test_a_tied_llama_trains_as_in_plain_torch_and_stays_tied(cell):
    cfg = configured("fsdp", *cell[1:], optimizer={"name": "adamw", "lr": 3e-3})
    wanted = oracle.train(llama(tie_word_embeddings=True), windows("llama"), cfg, world=2)
    for trained, same in played(tied, cell):
        assert same
        assert_conforms(trained, wanted, tolerance(*cell, "llama"))


def two_groups(params):
    params = list(params)
    groups = [
        {"params": [parameter for parameter in params if parameter.ndim > 1], "lr": 3e-3, "weight_decay": 0.2},
        {"params": [parameter for parameter in params if parameter.ndim < 2], "lr": 2e-2, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.9))


GROUPED = (*((*cell, False) for cell in CELLS), ("fsdp", "shard_optimizer", "fp32", True))
FALLING = {"name": "linear", "total_steps": 2 * UPDATES}


def grouped(backend, strategy, precision, zero_redundancy):
    native = {"fsdp": {"zero_redundancy_optimizer": True}} if zero_redundancy else {}
    cfg = configured(backend, strategy, precision, optimizer=None, scheduler=FALLING, native=native)
    with unishard.prepare(mlp(), cfg, optimizer=two_groups) as engine:
        trained = curve(train(engine, own_share(MICRO_BATCHES)))
        return trained, [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("cell", GROUPED, ids=lambda cell: "-".join(map(str, cell)))
def test_parameter_groups_keep_their_own_rate_and_weight_decay(cell):
    cfg = configured("fsdp", *cell[1:3], optimizer=None, scheduler=FALLING)
    wanted = oracle.train(mlp(), windows(), cfg, world=2, optimizer=two_groups)
    for trained, groups in played(grouped, cell, GROUPED):
        assert_conforms(trained, wanted, tolerance(*cell[:3]))
        assert groups == [(pytest.approx(3e-3 / 2), 0.2), (pytest.approx(2e-2 / 2), 0.0)]


# -- evaluation between backward and step
# -----------------------------------------------------------------------------------------


def evaluated(backend, strategy, precision):
    done, losses = [], []
    with prepare(configured(backend, strategy, precision)) as engine:
        for batch in engine.batches(own_share(MICRO_BATCHES)):
            loss = engine(**batch).loss
            engine.backward(loss)
            with torch.no_grad():
                losses.append((loss.item(), engine.eval()(**batch).loss.item()))
            engine.train()
            done.append((engine.mean(loss), engine.step()))
    return curve(done), losses


@cache
def plain(precision, seed=7, updates=UPDATES):
    return oracle.train(mlp(seed), windows(updates=updates), configured("fsdp", "full_shard", precision), world=2)


@everywhere
def test_evaluation_between_backward_and_step_sees_the_old_parameters_and_disturbs_nothing(cell):
    for trained, losses in played(evaluated, cell):
        assert_conforms(trained, plain(cell[2]), tolerance(*cell))
        assert [after for _, after in losses] == pytest.approx([before for before, _ in losses], rel=1e-6)


# -- two engines in one process
# ---------------------------------------------------------------------------------------------------

PAIRS = {
    "fsdp": (("fsdp", "full_shard", "fp32"), ("fsdp", "no_shard", "fp32")),
    "fsdp in bf16": (("fsdp", "shard_grad_op", "bf16"), ("fsdp", "full_shard", "bf16")),
    "deepspeed": (("deepspeed", "full_shard", "fp32"), ("deepspeed", "full_shard", "fp32")),
    "deepspeed, two stages": (("deepspeed", "shard_grad_op", "bf16"), ("deepspeed", "full_shard", "fp32")),
    "fsdp and deepspeed": (("fsdp", "full_shard", "fp32"), ("deepspeed", "full_shard", "bf16")),
    "deepspeed and fsdp": (("deepspeed", "shard_optimizer", "bf16"), ("fsdp", "shard_optimizer", "fp32")),
}
ORDERS = ("in turns", "crossed")
COUPLES = tuple((pair, order) for pair in PAIRS for order in ORDERS)
SEEDS = (7, 8)
TOGETHER = 2
"""Updates of both, before the first is closed."""


def two_engines(pair, order):
    """Both train; then the first is closed, and the second goes on.

    `crossed`: both forwards, both backwards, both steps.
    """
    engines = [unishard.prepare(mlp(seed), configured(*cell)) for seed, cell in zip(SEEDS, PAIRS[pair], strict=True)]
    share, first_ones = own_share(MICRO_BATCHES), TOGETHER * ACCUMULATION
    done = ([], [])
    for batches in zip(*(engine.batches(share[:first_ones]) for engine in engines), strict=True):
        losses = []
        for engine, batch in zip(engines, batches, strict=True):
            losses.append(engine(**batch).loss)
            if order == "in turns":
                engine.backward(losses[-1])
        if order == "crossed":
            for engine, loss in zip(engines, losses, strict=True):
                engine.backward(loss)
        for engine, loss, log in zip(engines, losses, done, strict=True):
            log.append((engine.mean(loss), engine.step()))
    first, second = engines
    first.close()
    done[1].extend(train(second, share[first_ones:]))
    second.close()
    return [curve(log) for log in done]


@pytest.mark.parametrize("couple", COUPLES, ids="-".join)
def test_two_engines_train_side_by_side_and_one_outlives_the_other(couple):
    for curves in played(two_engines, couple, COUPLES):
        for cell, seed, updates, trained in zip(PAIRS[couple[0]], SEEDS, (TOGETHER, UPDATES), curves, strict=True):
            assert_conforms(trained, plain(cell[2], seed, updates), tolerance(*cell))


# -- a layer that is called with other tensors in place of its weights
# ----------------------------------------------------------------


class Tenth(nn.Module):
    def forward(self, weight):
        return 0.9 * weight


class Replaced(nn.Module):
    """Computes a layer with nine tenths of its weight: by a call with other tensors, or by a parametrization."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(5)
        self.way, self.block, self.head = way, nn.Linear(13, 12), nn.Linear(12, 11)
        if way == "parametrization":
            register_parametrization(self.block, "weight", Tenth())

    def forward(self, x, labels):
        if self.way == "call":
            hidden = functional_call(self.block, {"weight": 0.9 * self.block.weight, "bias": self.block.bias}, (x,))
        else:
            hidden = self.block(x)
        logits = self.head(torch.tanh(hidden))
        return MlpOutput(functional.cross_entropy(logits, labels), logits)


def replaced(backend, strategy, way, train_):
    with unishard.prepare(Replaced(way), config(backend, strategy), train=train_) as engine:
        return curve(train(engine, own_share(2))) if train_ else engine(**own_share(1)[0]).loss


REPLACED = (
    ("deepspeed", "full_shard", "call"),
    ("deepspeed", "full_shard", "parametrization"),
    ("deepspeed", "shard_grad_op", "call"),
)
REFUSED = tuple((replaced, (*REPLACED[0], train_)) for train_ in (True, False))


def test_a_layer_with_other_tensors_for_its_weights_trains_or_is_named_with_what_does():
    played = play((*REFUSED, *((replaced, (*cell, True)) for cell in REPLACED[1:])))
    for refused in REFUSED:
        said = error(played[refused])
        assert said.startswith(
            "ModelError: the forward of block was called with other tensors in place of its parameters"
        )
        assert said.endswith("register_parametrization, or set sharding to shard_grad_op")
    windows = [everyones(turn, turn + 1, world=2) for turn in range(2)]
    wanted = oracle.train(Replaced("call"), windows, config("fsdp"), world=2)
    for cell in REPLACED[1:]:
        for found in values(played[replaced, (*cell, True)]):
            assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
            assert found.norms == pytest.approx(wanted.norms, rel=1e-5)
