"""What a user sees of save and load: what comes back, what is refused and how, and what is never lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, config, in_turn, my_rank, on_ranks, own_share, play, prepare, refused, train, values
from torch import nn
from torch.nn import functional

import unishard
from unishard.checkpoint import finding, manifest
from unishard.checkpoint.tensor_reader import Tensors
from unishard.testing.models import MlpOutput, mlp

ADAMW = {"name": "adamw", "lr": 1e-2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoints"))


# -- what comes back -------------------------------------------------------------------------------


class Model(nn.Module):
    """Dropout, a buffer of this rank's own, one that is not persistent, a frozen weight, a tied one, one of one
    element."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(13, 13, bias=False)
        self.inp.weight.requires_grad_(False)
        self.mid = nn.Linear(13, 13, bias=False)
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.mid.weight
        self.gain = nn.Parameter(torch.full((1,), 1.0 + seed))
        self.out = nn.Linear(13, 11)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, x, labels):
        self.seen += 1 + my_rank()
        hidden = functional.dropout(functional.gelu(self.again(self.mid(self.inp(x)))), 0.3, self.training)
        logits = self.out(hidden) * self.gain
        return MlpOutput(functional.cross_entropy(logits.float(), labels), logits)


STATE = {
    "epoch": 3,
    "best": float("inf"),
    "names": ["a", "b"],
    "counts": {7: (1, 2)},
    "ema": torch.arange(5.0),
    "raw": b"\x00\xff",
}


def whole_run(backend, strategy, root):
    """Saves in the middle of a run with dropout, goes on, and goes on again from the checkpoint in a fresh engine."""
    cfg = config(backend, strategy, optimizer=ADAMW)
    with unishard.prepare(Model(1), cfg) as engine:
        train(engine, own_share(3))
        folder = engine.save(f"{root}/{backend}-{strategy}", state=STATE if my_rank() == 0 else {"of": "another rank"})
        rest = [loss for loss, _ in train(engine, own_share(4))]
        seen = engine.module.seen.tolist()
    with unishard.prepare(Model(2), cfg) as engine:
        resumed = engine.load(folder, verify="bits")
        again = [loss for loss, _ in train(engine, own_share(4))]
        return (
            rest,
            again,
            resumed,
            seen,
            engine.module.seen.tolist(),
            engine.module.again.weight is engine.module.mid.weight,
        )


WHOLE = tuple((backend, strategy) for backend in BACKENDS for strategy in ("no_shard", "shard_grad_op", "full_shard"))


@pytest.mark.parametrize("cell", WHOLE, ids="-".join)
def test_a_fresh_engine_goes_on_bit_by_bit_with_what_the_user_saved(cell, root):
    played = values(play(tuple((whole_run, (*each, root)) for each in WHOLE))[whole_run, (*cell, root)])
    for rank, (rest, again, resumed, seen, seen_again, tied) in enumerate(played):
        assert again == rest
        assert (resumed.step, resumed.epoch, resumed.notes) == (3, 0, ())
        assert resumed.path == Path(root) / "-".join(cell) / "step-00000003"
        assert resumed.state["ema"].tolist() == [0, 1, 2, 3, 4]
        assert {key: value for key, value in resumed.state.items() if key != "ema"} == {
            key: STATE[key] for key in STATE if key != "ema"
        }
        if rank == 0:
            assert seen_again == seen
        assert tied
    facts = manifest.read(resumed.path)
    assert facts.frozen == ["inp.weight"]
    assert facts.ties == {"again.weight": "mid.weight"}
    assert facts.buffers == ["seen"]
    assert "model.passing" not in facts.tensors
    assert facts.model.class_name == "Model"
    tensors = Tensors(resumed.path)
    assert torch.equal(tensors.full("model.again.weight"), tensors.full("model.mid.weight"))
    assert tensors.full("optim.state.gain.step").item() == 3
    assert tensors.dtypes["model.mid.weight"] == torch.float32


# -- what is refused -------------------------------------------------------------------------------


def misused(backend, root):
    """Calls at the wrong time and place; each must leave an engine that trains on."""
    told = {}
    with prepare(config(backend, training={"gradient_accumulation_steps": 2})) as engine:
        first, second = own_share(2)
        engine.backward(engine(**first).loss)
        told["in a window"] = refused(engine.save, root)
        engine.step()
        engine.backward(engine(**second).loss)
        engine.step()
        told["nowhere"] = refused(engine.save)
        told["nothing there"] = refused(engine.load, f"{root}/nothing")
        told["latest of nowhere"] = refused(engine.load)
        told["state"] = refused(engine.save, f"{root}/state", state={"model": {"a": [object()]}})
        told["a file"] = refused(engine.save, __file__)
        train(engine, own_share(2))
    told["closed"] = refused(engine.save, root)
    return told


@in_turn
def test_misuse_is_one_clear_error_and_the_engine_trains_on(backend, root):
    for told in on_ranks(misused, backend, root):
        assert told["in a window"].startswith(
            "ContractError: save was called inside an accumulation window; call it when"
        )
        assert told["nowhere"].endswith("as in engine.save('checkpoints'), or set checkpoint.dir in the config")
        assert told["latest of nowhere"].startswith("ContractError: load needs a directory")
        assert told["nothing there"].startswith("CheckpointError: ")
        assert "nothing" in told["nothing there"]
        assert "state.model.a.0 is a object" in told["state"]
        assert told["a file"].startswith("CheckpointError: ")
        assert told["closed"].startswith("ContractError: save was called on a closed engine")


def unfit(backend, root):
    """Loads what does not fit: another model, another optimizer, a damaged file."""
    told = {}
    with prepare(config(backend, optimizer=ADAMW)) as engine:
        train(engine, own_share(1))
        folder = engine.save(f"{root}/unfit-{backend}")
    with unishard.prepare(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), config(backend, optimizer=ADAMW)) as engine:
        before = engine.parameter("0.weight")
        told["model"] = refused(engine.load, folder)
        told["unchanged"] = torch.equal(before, engine.parameter("0.weight"))
    with prepare(config(backend)) as engine:
        told["optimizer"] = refused(engine.load, folder)
        told["notes"] = engine.load(folder, strict=False).notes
        train(engine, own_share(1))
    dist.barrier()
    if my_rank() == 0:
        damaged = folder / "__1_0.distcp"
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
    dist.barrier()
    with prepare(config(backend, optimizer=ADAMW)) as engine:
        told["flipped"] = refused(engine.load, folder)
        told["bits"] = refused(engine.load, folder, verify="bits")
    return told


@in_turn
def test_what_does_not_fit_or_is_damaged_is_named_before_anything_changes(backend, root):
    for told in on_ranks(unfit, backend, root):
        assert "0.weight: not in the checkpoint" in told["model"]
        assert "or pass strict=False" in told["model"]
        assert told["unchanged"]
        assert "AdamW kept exp_avg, exp_avg_sq, step, the current optimizer keeps momentum_buffer" in told["optimizer"]
        assert any("momentum_buffer" in note for note in told["notes"])
        assert "__1_0.distcp" in told["flipped"]
        assert "unishard checkpoint list" in told["flipped"]
        assert "__1_0.distcp" in told["bits"]


# -- in the background, by itself, and before the end ----------------------------------------------


def in_background(backend, root):
    """Trains on at once after a save, and compares what was saved with what was there at the call."""
    cfg = config(
        backend, optimizer=ADAMW, checkpoint={"dir": f"{root}/later-{backend}", "async_save": True, "keep_last": 2}
    )
    with prepare(cfg) as engine:
        kept = {}
        for _ in range(4):
            train(engine, own_share(1))
            folder = engine.save()
            kept[folder.name] = engine.parameter("inp.weight").clone()
        train(engine, own_share(1))
        engine.wait()
        saved = {
            found.path.name: Tensors(found.path).full("model.inp.weight")
            for found in finding.checkpoints(folder.parent)
        }
        told = refused(engine.save, __file__)  # in the background, so what goes wrong is raised by the next call
        later = refused(engine.wait)
        same = {name: torch.equal(kept[name], value.to(kept[name])) for name, value in saved.items()}
        train(engine, own_share(1))
    return same, told, later


@in_turn
def test_a_save_in_the_background_holds_the_moment_of_its_call(backend, root):
    for same, told, later in on_ranks(in_background, backend, root):
        assert same == {"step-00000003": True, "step-00000004": True}
        assert "nothing" in (told, later)
        assert f"{told}{later}".replace("nothing", "").startswith("CheckpointError: ")


def two_at_once(backend, root):
    """Two engines save in the background, each while the other's save may still be running, and one exports."""
    cfg = config(backend, optimizer=ADAMW, checkpoint={"async_save": True})
    with prepare(cfg) as one, prepare(cfg) as other:
        for turn in range(3):
            train(one, own_share(1))
            train(other, own_share(2))
            one.save(f"{root}/one-{backend}")
            other.save(f"{root}/other-{backend}")
            one.export(f"{root}/exported-{backend}-{turn}")
        one.wait()
        other.wait()
        return [
            engine.load(f"{root}/{name}-{backend}", verify="bits").step
            for engine, name in ((one, "one"), (other, "other"))
        ]


@in_turn
def test_engines_that_save_in_the_background_do_not_get_into_each_others_way(backend, root):
    for steps in on_ranks(two_at_once, backend, root):
        assert steps == [3, 6]


def by_itself(backend, root):
    """Saves as the config says, with the state that the loop has named."""
    sections = {"dir": f"{root}/auto-{backend}", "every_steps": 2, "keep_last": 2, "keep_every": 4}
    with prepare(config(backend, checkpoint=sections)) as engine:
        done = []
        engine.on_save(lambda: {"losses": len(done)})
        for micro_batch in engine.batches(own_share(11)):
            engine.backward(engine(**micro_batch).loss)
            done.append(engine.step())
    with prepare(config(backend, checkpoint=sections)) as engine:
        return engine.load()


@in_turn
def test_the_config_says_when_to_save_and_what_to_keep(backend, root):
    for resumed in on_ranks(by_itself, backend, root):
        assert [found.step for found in finding.checkpoints(Path(root) / f"auto-{backend}")] == [4, 8, 10]
        assert (resumed.step, resumed.state) == (10, {"losses": 9})


# -- learning rates, trainability, evaluation ------------------------------------------------------


def changed(backend, root):
    """Goes on with another learning rate in the config, with one that was set by hand, and with parameters that were
    frozen midway."""
    with prepare(config(backend, optimizer=ADAMW)) as engine:
        train(engine, own_share(1))
        engine.optimizer.param_groups[0]["lr"] = 0.5
        engine.set_trainable("head", False)
        train(engine, own_share(1))
        folder = engine.save(f"{root}/changed-{backend}")
    with prepare(config(backend, optimizer=ADAMW)) as engine:
        by_hand = (
            engine.load(folder),
            engine.lr,
            engine.module.head.bias.requires_grad,
            engine.module.inp.bias.requires_grad,
        )
    with prepare(config(backend, optimizer=ADAMW | {"lr": 1e-3, "weight_decay": 0.3})) as engine:
        by_config = engine.load(folder), engine.lr
    with unishard.prepare(mlp(3), config(backend, precision="bf16"), train=False) as engine:
        evaluated = engine.load(folder)
        saved = Tensors(folder).full("model.head.bias").bfloat16().float()
        same = torch.equal(engine.parameter("head.bias").cpu(), saved)
    return by_hand, by_config, (evaluated, same)


@in_turn
def test_the_config_counts_and_what_the_loop_changed_is_as_it_was(backend, root):
    for by_hand, by_config, evaluated in on_ranks(changed, backend, root):
        assert by_hand[1:] == (0.5, False, True)
        assert by_hand[0].notes == ()
        assert by_config[1] == 1e-3
        assert "group 0 of the optimizer: peak lr was 0.01; using 0.001 of the config" in by_config[0].notes
        assert any("weight_decay was 0.01; using 0.3 of the config" in note for note in by_config[0].notes)
        assert evaluated[1]


def other_batch(backend, root):
    """Goes on with twice the accumulation, and with the data from its beginning."""
    with prepare(config(backend)) as engine:
        train(engine, own_share(1))
        folder = engine.save(f"{root}/other-batch-{backend}")
    with prepare(config(backend, training={"gradient_accumulation_steps": 2})) as engine:
        return engine.load(folder, data=False).notes


@in_turn
def test_another_global_batch_is_noted(backend, root):
    for notes in on_ranks(other_batch, backend, root):
        (note,) = notes
        assert (
            note
            == "the global batch size was 4 and is now 8; adjust training.gradient_accumulation_steps to the number of "
            "ranks"
        )
