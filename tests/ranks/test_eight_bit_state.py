"""Moments of 8 bits in checkpoints, and optimizers of bitsandbytes as users pass them; the conformance suite has the
rest of `adamw_8bit`."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from harness import heard, in_ranks, play, values
from harness.training import BACKENDS, config, curve, everyones, my_rank, own_share, train

import unishard
from unishard.checkpoint.tensor_names import of_optimizer
from unishard.checkpoint.tensor_reader import Tensors
from unishard.testing import oracle
from unishard.testing.features.eight_bit import BOUNDS, wide

EIGHT, FULL = "adamw_8bit", "adamw"
BEFORE, AFTER = 3, 3
SECTIONS = {
    "plain": {},
    "offloaded": {"offload": {"optimizer": "cpu"}},
    "pure": {"precision": {"compute": "bf16", "master": "bf16"}},
}
MECHANISMS = (
    ("fsdp", "no_shard", "plain"),
    ("fsdp", "full_shard", "pure"),
    ("deepspeed", "shard_grad_op", "plain"),
    ("deepspeed", "full_shard", "offloaded"),
)
MOVES = (
    ("deepspeed", "shard_grad_op", EIGHT, "fsdp", "full_shard", EIGHT, 4),
    ("fsdp", "full_shard", EIGHT, "deepspeed", "full_shard", EIGHT, 1),
    ("fsdp", "full_shard", FULL, "deepspeed", "shard_optimizer", EIGHT, 2),
    ("deepspeed", "full_shard", EIGHT, "fsdp", "no_shard", FULL, 2),
)


def configured(backend, strategy, name, world, **sections):
    """The same four micro-batches in each update, whatever the number of ranks."""
    optimizer = None if name is None else {"name": name, "lr": 3e-3, "weight_decay": 0.1}
    training = {"gradient_accumulation_steps": 4 // world, "gradient_clipping": 0.5}
    return config(backend, strategy, optimizer=optimizer, training=training, **sections)


def batches(world, first, last):
    return own_share(last * 4 // world)[first * 4 // world :]


def saved(backend, strategy, optimizer, folder):
    with unishard.prepare(wide(), configured(backend, strategy, optimizer, 2)) as engine:
        train(engine, batches(2, 0, BEFORE))
        engine.save(folder)


def resumed(backend, strategy, optimizer, folder, world):
    with unishard.prepare(wide(), configured(backend, strategy, optimizer, world)) as engine:
        found = engine.load(folder, verify="bits")
        return curve(train(engine, batches(world, BEFORE, BEFORE + AFTER))), found.notes


def is_8bit(folder, name):
    """Whether the elements of a block have fewer values than elements."""
    block = Tensors(folder).full(of_optimizer(name, "exp_avg")).view(-1)[:256]
    return len(block.unique()) < 200


def weights(engine):
    return {name: engine.weights.read(name) for name, _ in engine.module.named_parameters()}


@in_ranks(cells=MECHANISMS)
def test_a_run_that_resumes_in_the_same_place_ends_with_the_same_bits(backend, strategy, kind, root):
    cfg, ends = configured(backend, strategy, EIGHT, 2, **SECTIONS[kind]), []
    with unishard.prepare(wide(), cfg) as engine:
        train(engine, batches(2, 0, BEFORE))
        engine.save(root)
        ends.append((train(engine, batches(2, BEFORE, BEFORE + AFTER)), weights(engine)))
    with unishard.prepare(wide(), cfg) as engine:
        notes = engine.load(root, verify="bits").notes
        ends.append((train(engine, batches(2, BEFORE, BEFORE + AFTER)), weights(engine)))
    (losses, first), (again, second) = ends
    assert notes == ()
    assert [loss for loss, _ in losses] == [loss for loss, _ in again]
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """What the runs that go on elsewhere return, by move; runs of a number of ranks share processes."""
    root = tmp_path_factory.mktemp("moved")
    every = {move: f"{root}/{number}" for number, move in enumerate(MOVES)}
    for outcomes in play(tuple((saved, (*move[:3], folder)) for move, folder in every.items())).values():
        values(outcomes)
    found = {}
    for world in {move[-1] for move in every}:
        here = {move: (*move[3:6], folder, world) for move, folder in every.items() if move[-1] == world}
        played = play(tuple((resumed, cell) for cell in here.values()), world)
        found |= {move: values(played[resumed, cell]) for move, cell in here.items()}
    return found


@pytest.mark.parametrize("move", MOVES, ids=lambda move: "-".join(map(str, move)))
def test_a_run_goes_on_on_another_engine_and_number_of_ranks_and_with_another_adamw(move, moved):
    windows = [everyones(2 * turn, 2 * turn + 2, world=2) for turn in range(BEFORE + AFTER)]
    whole = oracle.train(wide(), windows, configured("fsdp", "no_shard", EIGHT, 2), world=2)
    rest = oracle.Curve(*(each[BEFORE:] for each in whole))
    bound = BOUNDS["fp32"].losses if move[2] == move[5] else 5e-3
    for found, notes in moved[move]:
        assert found.losses == pytest.approx(rest.losses, rel=bound)
        rounded = [note for note in notes if "rounded to 8 bits anew" in note]
        assert len(rounded) == (move[5] == EIGHT)
        for note in rounded:
            changed, elements = (
                int(each.replace(",", "")) for each in re.match(r"([\d,]+) of ([\d,]+) ", note).groups()
            )
            assert 0 < changed <= elements
        assert any("the optimizer was AdamW" in note for note in notes) == (move[2] != move[5])


@in_ranks(cells=tuple((backend,) for backend in BACKENDS))
def test_a_checkpoint_has_the_moments_of_adamw(backend, root):
    with unishard.prepare(wide(), configured(backend, "full_shard", EIGHT, 2)) as engine:
        train(engine, batches(2, 0, 1))
        folder = engine.save(root)
    saved = Tensors(folder)
    moments = [saved.full(of_optimizer("blocks.0.up.weight", key)) for key in ("exp_avg", "exp_avg_sq")]
    assert {(each.shape, each.dtype) for each in moments} == {(torch.Size([97, 53]), torch.float32)}
    assert is_8bit(folder, "blocks.0.up.weight")
    assert not is_8bit(folder, "inp.weight")
    assert float(saved.full(of_optimizer("blocks.0.up.weight", "step"))) == 1


@in_ranks(cells=tuple((backend,) for backend in BACKENDS))
def test_parameters_that_bitsandbytes_is_told_to_keep_in_32_bits_are_kept_so(backend, root):
    from bitsandbytes.optim import GlobalOptimManager, PagedAdamW8bit

    model = wide()
    kept = model.blocks[0].up.weight
    GlobalOptimManager.get_instance().register_module_override(model.blocks[1].up, "weight", {"optim_bits": 32})
    GlobalOptimManager.get_instance().override_config(kept, "optim_bits", 32)
    cfg = configured(backend, "full_shard", None, 2)
    with (
        heard(level=logging.WARNING) as said,
        unishard.prepare(model, cfg, PagedAdamW8bit(model.parameters())) as engine,
    ):
        train(engine, batches(2, 0, 1))
        folder = engine.save(root)
    assert [is_8bit(folder, f"blocks.{number}.up.weight") for number in range(3)] == [False, False, True]
    assert (my_rank() == 0) == any("not paged" in line for line in said)


@in_ranks(cells=tuple((backend,) for backend in BACKENDS))
def test_what_is_not_supported_of_bitsandbytes_is_one_error_before_sharding(backend):
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

    model = wide()
    GlobalOptimManager.get_instance().override_config(model.head.bias, "lr", 0.1)
    with pytest.raises(unishard.ConfigError, match="put other options into a parameter group"):
        unishard.prepare(model, configured(backend, "full_shard", None, 2), AdamW8bit(model.parameters()))
