"""Optimizers of matrices on shards, as users write them, and where their state goes; the conformance suite has Muon."""

from __future__ import annotations

import logging
import math
from itertools import pairwise

import pytest
import torch
from harness import assert_conforms, heard, in_ranks, my_rank, play, refused, values
from harness.training import BACKENDS, config, curve, everyones, own_share, train

import unishard
from unishard.testing import oracle
from unishard.testing.conformance import TOLERANCES
from unishard.testing.models import mlp

MUON = {"name": "muon", "lr": 0.01, "adamw_lr": 3e-3, "weight_decay": 0.1, "ns_dtype": "fp32"}
BEFORE, AFTER = 3, 3


class Preconditioned(unishard.MatrixOptimizer):
    """As Shampoo on one side: what it keeps of a matrix has another shape than the matrix, and is on its owner."""

    def update(self, matrix, gradient, state, options):
        state["updates"] = state.get("updates", 0) + 1
        seen = gradient @ gradient.mT
        state["left"] = state["left"] + seen if "left" in state else seen + torch.eye(len(gradient))
        return torch.linalg.solve(state["left"], gradient) * state["updates"] ** 0.5


def preconditioned(parameters):
    every = list(parameters)
    inside = [each for each in every if each.shape in ((37, 23), (23, 37))]
    others = [each for each in every if each.shape not in ((37, 23), (23, 37))]
    return Preconditioned(
        [{"params": inside}, {"params": others, "matrices": False, "lr": 3e-3}], lr=0.05, weight_decay=0.1
    )


def configured(backend, strategy, kind, world):
    """The same four micro-batches in each update, whatever the number of ranks."""
    return config(
        backend,
        strategy,
        optimizer=MUON if kind == "muon" else None,
        training={"gradient_accumulation_steps": 4 // world, "gradient_clipping": 0.5},
    )


def prepared(backend, strategy, kind, world):
    model = mlp()
    made = None if kind == "muon" else preconditioned
    return unishard.prepare(model, configured(backend, strategy, kind, world), made)


def batches(world, first, last):
    return own_share(last * 4 // world)[first * 4 // world :]


def saved(backend, strategy, kind, folder):
    with prepared(backend, strategy, kind, 2) as engine:
        train(engine, batches(2, 0, BEFORE))
        engine.save(folder)


def resumed(backend, strategy, kind, folder, world):
    with prepared(backend, strategy, kind, world) as engine:
        assert engine.load(folder, verify="bits").step == BEFORE
        return curve(train(engine, batches(world, BEFORE, BEFORE + AFTER)))


def plain(kind):
    windows = [everyones(2 * turn, 2 * turn + 2, world=2) for turn in range(BEFORE + AFTER)]
    return oracle.train(
        mlp(),
        windows,
        configured("fsdp", "no_shard", kind, 2),
        world=2,
        optimizer=None if kind == "muon" else preconditioned,
    )


MOVES = (
    ("deepspeed", "shard_grad_op", "fsdp", "full_shard", 4),
    ("fsdp", "full_shard", "deepspeed", "full_shard", 1),
    ("deepspeed", "full_shard", "fsdp", "no_shard", 2),
)


KINDS = ("muon", "preconditioned")


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """The curves of all runs that go on elsewhere, by kind and move; runs of a number of ranks share processes."""
    root = tmp_path_factory.mktemp("moved")
    every = [(kind, move, f"{root}/{kind}-{'-'.join(map(str, move))}") for kind in KINDS for move in MOVES]
    saves = tuple((saved, (*move[:2], kind, folder)) for kind, move, folder in every)
    for outcomes in play(saves).values():
        values(outcomes)
    curves = {}
    for world in {move[-1] for move in MOVES}:
        here = {(kind, move): (*move[2:4], kind, folder, world) for kind, move, folder in every if move[-1] == world}
        played = play(tuple((resumed, cell) for cell in here.values()), world)
        curves |= {key: values(played[resumed, cell]) for key, cell in here.items()}
    return curves


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("move", MOVES, ids=lambda move: "-".join(map(str, move)))
def test_a_run_goes_on_on_another_engine_and_number_of_ranks(kind, move, moved):
    rest = oracle.Curve(*(each[BEFORE:] for each in plain(kind)))
    for found in moved[kind, move]:
        assert_conforms(found, rest, TOLERANCES["fp32"])


@in_ranks(cells=tuple((backend,) for backend in BACKENDS))
def test_a_schedule_scales_both_rates_and_the_log_says_which_parameters_are_matrices(backend):
    logging.getLogger("unishard").setLevel(logging.INFO)
    cfg = config(backend, optimizer=MUON, scheduler={"name": "linear", "total_steps": 4})
    with heard(level=logging.INFO) as lines, unishard.prepare(mlp(), cfg) as engine:
        rates = [[group["lr"] for group in engine.optimizer.param_groups]]
        for _, _ in train(engine, own_share(2)):
            rates.append([group["lr"] for group in engine.optimizer.param_groups])
        assert rates[0] == [0.01, 3e-3]
        assert all(later[0] / first[0] == pytest.approx(later[1] / first[1]) for first, later in pairwise(rates))
        assert rates[2][0] == pytest.approx(0.005)
    if unishard.Topology.from_environment().rank == 0:
        (line,) = [each for each in lines if "matrices" in each]
        assert "Muon updates 6 matrices (blocks.0.up.weight, " in line
        assert "AdamW 19 other parameters (inp.weight, " in line


def windowed(backend, strategy, **training):
    return config(backend, strategy, optimizer=MUON, training={"gradient_clipping": 0.5} | training)


def with_a_bad_window(engine):
    """Losses of the first and third micro-batch; what came of the second, of which rank 1 has infinite gradients."""
    first, second, third = own_share(3)
    losses = [loss for loss, _ in train(engine, [first])]
    engine.backward(engine(**second).loss * (math.inf if my_rank() else 1.0))
    outcome = refused(engine.step)
    return [*losses, engine.mean(engine(**third).loss)], outcome


@in_ranks(
    cells=(
        *tuple((backend, "full_shard") for backend in BACKENDS),
        ("fsdp", "no_shard"),
        ("deepspeed", "shard_grad_op"),
    )
)
def test_a_gradient_that_is_not_finite(backend, strategy):
    """Skipped, raised or let through, as of any optimizer."""
    found = {}
    for word in ("skip", "raise", "ignore"):
        with unishard.prepare(mlp(), windowed(backend, strategy, nonfinite=word)) as engine:
            found[word] = with_a_bad_window(engine)
    with unishard.prepare(mlp(), windowed(backend, strategy)) as engine:
        first, _, third = own_share(3)
        expected = [loss for loss, _ in train(engine, [first])] + [engine.mean(engine(**third).loss)]
    assert found["skip"] == (expected, "nothing")
    assert found["raise"][0] == expected
    assert found["raise"][1].startswith("NonFiniteError: a gradient is infinite or NaN")
    assert found["ignore"][1] == "nothing"
    assert math.isnan(found["ignore"][0][1])


@in_ranks(world=4)
def test_a_second_copy_of_the_parameters_in_smaller_groups():
    """`reshard_after_forward: 2` on four ranks, which DeepSpeed does by its hpZ."""
    for backend in BACKENDS:
        cfg = windowed(backend, {"strategy": "full_shard", "reshard_after_forward": 2}, gradient_accumulation_steps=2)
        with unishard.prepare(mlp(), cfg) as engine:
            found = curve(train(engine, own_share(6)))
        windows = [everyones(2 * turn, 2 * turn + 2, world=4) for turn in range(3)]
        assert_conforms(found, oracle.train(mlp(), windows, cfg, world=4), TOLERANCES["fp32"])
