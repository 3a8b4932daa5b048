"""What a user sees of save and load: what comes back, what is refused and how, and what is never lost."""

from __future__ import annotations

from pathlib import Path

import torch
from harness import EACH, in_ranks, refused, steps
from harness.training import ADAMW, BACKENDS, config, losses_of, my_rank, own_share, prepare, train, update
from torch import nn
from torch.nn import functional

import unishard
from unishard.checkpoint import finding, manifest
from unishard.checkpoint.tensor_reader import Tensors
from unishard.testing.models import MlpOutput, mlp

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


WHOLE = tuple((backend, strategy) for backend in BACKENDS for strategy in ("no_shard", "shard_grad_op", "full_shard"))


@in_ranks(cells=WHOLE)
def test_a_fresh_engine_goes_on_bit_by_bit_with_what_the_user_saved(backend, strategy, root):
    """Saves in the middle of a run with dropout, goes on, and goes on again from the checkpoint in a fresh engine."""
    cfg = config(backend, strategy, optimizer=ADAMW)
    with unishard.prepare(Model(1), cfg) as engine:
        train(engine, own_share(3))
        folder = engine.save(root, state=STATE if my_rank() == 0 else {"of": "another rank"})
        rest = losses_of(engine, own_share(4))
        seen = engine.module.seen.tolist()
    with unishard.prepare(Model(2), cfg) as engine:
        resumed = engine.load(folder, verify="bits")
        again = losses_of(engine, own_share(4))
    assert again == rest
    assert my_rank() or engine.module.seen.tolist() == seen
    assert engine.module.again.weight is engine.module.mid.weight
    assert (resumed.step, resumed.epoch, resumed.notes) == (3, 1, ())
    assert resumed.path == Path(root, "step-00000003")
    if my_rank():
        assert resumed.state == {"of": "another rank"}
    else:
        assert resumed.state.pop("ema").tolist() == [0, 1, 2, 3, 4]
        assert resumed.state == {key: STATE[key] for key in STATE if key != "ema"}
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


@in_ranks(cells=EACH, in_turn=True)
def test_misuse_is_one_clear_error_and_the_engine_trains_on(backend, root):
    """Calls at the wrong time and place; each must leave an engine that trains on."""
    with prepare(config(backend, "no_shard", training={"gradient_accumulation_steps": 2})) as engine:
        first, second = own_share(2)
        engine.backward(engine(**first).loss)
        inside = "ContractError: save was called inside an accumulation window; call it when"
        assert refused(engine.save, root).startswith(inside)
        engine.step()
        update(engine, second)
        nowhere = "as in engine.save('checkpoints'), or set checkpoint.dir in the config"
        assert refused(engine.save).endswith(nowhere)
        told = refused(engine.load, f"{root}/nothing")
        assert told.startswith("CheckpointError: ")
        assert "nothing" in told
        assert refused(engine.load).startswith("ContractError: load needs a directory")
        told = refused(engine.save, f"{root}/state", state={"model": {"a": [object()]}})
        assert "state.model.a.0 is a object" in told
        assert refused(engine.save, __file__).startswith("CheckpointError: ")
        train(engine, own_share(2))
    assert refused(engine.save, root).startswith("ContractError: save was called on a closed engine")


@in_ranks(cells=EACH, in_turn=True)
def test_what_does_not_fit_is_named_before_anything_changes(backend, root):
    """Another model, another optimizer."""
    with prepare(config(backend, optimizer=ADAMW)) as engine:
        train(engine, own_share(1))
        folder = engine.save(root)
    with unishard.prepare(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), config(backend, optimizer=ADAMW)) as engine:
        before = engine.weights.read("0.weight")
        told = refused(engine.load, folder)
        assert "0.weight: not in the checkpoint" in told
        assert "or pass strict=False" in told
        assert torch.equal(before, engine.weights.read("0.weight"))
    with prepare(config(backend)) as engine:
        told = refused(engine.load, folder)
        assert "AdamW kept exp_avg, exp_avg_sq, step, the current optimizer keeps momentum_buffer" in told
        assert any("momentum_buffer" in note for note in engine.load(folder, strict=False).notes)
        train(engine, own_share(1))


# -- in the background, by itself, and before the end ----------------------------------------------


@in_ranks(cells=EACH, in_turn=True)
def test_a_save_in_the_background_holds_the_moment_of_its_call(backend, root):
    """Trains on at once after a save, and compares what was saved with what was there at the call."""
    cfg = config(backend, optimizer=ADAMW, checkpoint={"dir": root, "async_save": True, "keep_last": 2})
    with prepare(cfg) as engine:
        kept = {}
        for _ in range(4):
            train(engine, own_share(1))
            folder = engine.save()
            kept[folder.name] = engine.weights.read("inp.weight").clone()
        train(engine, own_share(1))
        engine.wait()
        saved = {
            found.name: Tensors(found.path).full("model.inp.weight") for found in finding.checkpoints(folder.parent)
        }
        # In the background, so what goes wrong is raised by the next call.
        told = [refused(engine.save, __file__), refused(engine.wait)]
        train(engine, own_share(1))
    assert {name: torch.equal(kept[name], value.to(kept[name])) for name, value in saved.items()} == {
        "step-00000003": True,
        "step-00000004": True,
    }
    told.remove("nothing")
    assert told[0].startswith("CheckpointError: ")


@in_ranks(cells=EACH, in_turn=True)
def test_the_config_says_when_to_save_and_what_to_keep(backend, root):
    """With the state that the loop has named."""
    cfg = config(backend, "no_shard", checkpoint={"dir": root, "every_steps": 2, "keep_last": 2, "keep_every": 4})
    with prepare(cfg) as engine:
        done = []
        engine.framework.on_save(lambda: {"losses": len(done)})
        for micro_batch in engine.batches(own_share(11)):
            done.append(update(engine, micro_batch))
    with prepare(cfg) as engine:
        resumed = engine.load()
        assert (resumed.step, resumed.state) == (10, {"losses": 9})
    assert steps(root) == [4, 8, 10]


# -- learning rates, trainability, evaluation ------------------------------------------------------


@in_ranks(cells=EACH, in_turn=True)
def test_the_config_counts_and_what_the_loop_changed_is_as_it_was(backend, root):
    """Goes on with another learning rate in the config, with one that was set by hand, and with parameters that were
    frozen midway."""
    with prepare(config(backend, optimizer=ADAMW)) as engine:
        train(engine, own_share(1))
        engine.optimizer.param_groups[0]["lr"] = 0.5
        engine.weights.set_trainable("head", False)
        train(engine, own_share(1))
        folder = engine.save(root)
    with prepare(config(backend, optimizer=ADAMW)) as engine:
        assert engine.load(folder).notes == ()
        trained = [getattr(engine.module, name).bias.requires_grad for name in ("head", "inp")]
        assert (engine.lr, trained) == (0.5, [False, True])
    with prepare(config(backend, optimizer=ADAMW | {"lr": 1e-3, "weight_decay": 0.3})) as engine:
        notes = engine.load(folder).notes
        assert engine.lr == 1e-3
        assert "group 0 of the optimizer: peak lr was 0.01; using 0.001 of the config" in notes
        assert any("weight_decay was 0.01; using 0.3 of the config" in note for note in notes)
    with unishard.prepare(mlp(3), config(backend, precision="bf16"), train=False) as engine:
        engine.load(folder)
        saved = Tensors(folder).full("model.head.bias").bfloat16().float()
        assert torch.equal(engine.weights.read("head.bias").cpu(), saved)


@in_ranks(cells=EACH, in_turn=True)
def test_what_the_config_changes_of_the_loop_is_noted(backend, root):
    """Goes on with twice the accumulation, another clipping and schedule, and with the data from its beginning."""
    with prepare(config(backend, "no_shard")) as engine:
        train(engine, own_share(1))
        folder = engine.save(root)
    changed = {
        "training": {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
        "scheduler": {"name": "linear", "total_steps": 20},
    }
    with prepare(config(backend, "no_shard", **changed)) as engine:
        assert engine.load(folder, data=False).notes == (
            "the global batch size was 4 and is now 8; adjust training.gradient_accumulation_steps to the number of "
            "ranks",
            "training.gradient_accumulation_steps was 1; using 2 of the config",
            "training.gradient_clipping was None; using 0.5 of the config",
            "scheduler.name was constant; using linear of the config",
            "scheduler.total_steps was None; using 20 of the config",
        )
