"""Saves and loads where runs go wrong silently: several engines, other formats, other schedules, frozen blocks, models
that grew."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import EACH, heard, in_ranks, in_turn, on_ranks, refused, steps
from harness.training import ADAMW, OTHER, checked, config, losses_of, my_rank, own_share, prepare, train, update
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import unishard
from dev.ranks.interception import stopped
from unishard.checkpoint import manifest
from unishard.checkpoint.comparing import compare
from unishard.checkpoint.convert import convert
from unishard.checkpoint.export.offline import export_checkpoint
from unishard.checkpoint.hashing import hash_of
from unishard.checkpoint.verifying import damaged, hashes_of
from unishard.engine.state import snapshot
from unishard.testing.models import MlpOutput, mlp

PURE = {"compute": "bf16", "master": "bf16"}


# -- several engines in one process ----------------------------------------------------------------


@in_ranks(cells=EACH, in_turn=True)
def test_two_engines_save_beside_each_other_and_not_in_one_directory(backend, root):
    """Both save in the background after every update, each into its own directory."""
    cfgs = [
        config(backend, "no_shard", checkpoint={"dir": f"{root}/{name}", "async_save": True, "every_steps": 1})
        for name in "ab"
    ]
    with prepare(cfgs[0]) as first, prepare(cfgs[1]) as second:
        for micro_batch in own_share(4):
            for engine in (first, second):
                update(engine, micro_batch)
        told = refused(second.save, cfgs[0].checkpoint.dir)
        assert "another engine of this process saves in" in told
        first.save(f"{root}/c")
        first.framework.leave(f"{root}/c")
        second.save(f"{root}/c")
        assert "another engine" in refused(first.save, f"{root}/c")
    with prepare(cfgs[0]) as again:
        assert again.load().step == 4
        assert refused(again.save) == "nothing"
    assert [steps(f"{root}/{name}") for name in "ab"] == [[1, 2, 3, 4]] * 2


@in_ranks(cells=EACH, in_turn=True)
def test_a_signal_reaches_every_engine_and_is_given_back_in_any_order(backend, root):
    """Two engines wait for the same signal; the second is closed after the first, and neither is left in the way."""
    before = signal.getsignal(signal.SIGUSR1)
    cfgs = [config(backend, "no_shard", checkpoint={"dir": f"{root}/{name}", "on_signal": ["USR1"]}) for name in "ab"]
    first, second = map(prepare, cfgs)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended:
        train(first, own_share(1))
    assert ended.value.code == 85
    first.close()
    second.close()
    assert signal.getsignal(signal.SIGUSR1) == before


@in_ranks(world=1, cells=EACH, in_turn=True)
def test_a_handler_of_the_script_beside_on_signal_is_said(backend, root):
    def mine(number, frame):
        came.append(number)

    def chained(number, frame):
        former(number, frame)

    came, cfg = [], config(backend, "no_shard", checkpoint={"dir": root, "on_signal": ["USR1"]})
    with heard() as lines:
        signal.signal(signal.SIGUSR1, mine)
        engine = prepare(cfg)
        train(engine, own_share(1))
        former = signal.signal(signal.SIGUSR1, chained)
        train(engine, own_share(2))
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit):
            train(engine, own_share(1))
        engine.close()
    where = "test_a_handler_of_the_script_beside_on_signal_is_said.<locals>"
    assert [line for line in lines if "on_signal" in line] == [
        f"checkpoint.on_signal: SIGUSR1 had a handler, {where}.mine, which is not called while this engine is open",
        f"checkpoint.on_signal: SIGUSR1 has another handler since prepare, {where}.chained: a save follows only if that "
        "calls the one before it, which signal.signal returned",
    ]
    assert came == []


@in_ranks(cells=EACH, in_turn=True)
def test_a_load_of_a_model_that_does_not_train_leaves_the_random_numbers_alone(backend, root):
    """Beside one that trains."""
    with prepare(config(backend)) as engine:
        folder = engine.save(root)
    with unishard.prepare(mlp(3), config(backend), train=False) as engine:
        torch.manual_seed(7)
        expected = torch.rand(1)
        torch.manual_seed(7)
        engine.load(folder)
        assert torch.equal(expected, torch.rand(1))


# -- formats ---------------------------------------------------------------------------------------


class WideMoments(torch.optim.Optimizer):
    """Keeps its moment in fp32 whatever the format of the parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["moment"].mul_(0.9).add_(parameter.grad.float())
                parameter.add_((-group["lr"] * state["moment"]).to(parameter.dtype))


@in_ranks(cells=EACH, in_turn=True)
def test_pure_bf16_with_wide_moments_is_the_same_to_the_bit_on_the_other_engine(backend, root):
    """From full_shard to shard_grad_op of the other engine, where ranks hold nothing of some parameters."""

    def tensors_of(folder):
        return {name: facts for name, facts in manifest.read(folder).tensors.items() if not name.startswith("rng.")}

    with unishard.prepare(mlp(), config(backend, optimizer=None, precision=PURE), WideMoments) as engine:
        train(engine, own_share(2))
        folder = engine.save(f"{root}/first")
    other = config(OTHER[backend], "shard_grad_op", optimizer=None, precision=PURE)
    with unishard.prepare(mlp(3), other, WideMoments) as engine:
        assert engine.load(folder, verify="bits").notes == ()
        assert tensors_of(folder) == tensors_of(engine.save(f"{root}/again"))
    assert tensors_of(folder)["optim.state.inp.weight.moment"].dtype == "float32"


@in_ranks(cells=EACH, in_turn=True)
def test_a_run_in_bf16_that_goes_on_in_fp16_begins_with_a_scale(backend, root):
    with prepare(config(backend, precision="bf16")) as engine:
        folder = engine.save(root)
    with prepare(config(backend, precision="fp16")) as engine:
        before = engine.gradients.loss_scale
        engine.load(folder)
        assert engine.gradients.loss_scale == before > 1


def odd_tensors(seed):
    """Dtypes and layouts that an optimizer does not train, but that models and users keep."""
    made = torch.Generator().manual_seed(seed)
    plain = torch.randn(6, 8, generator=made)
    complex_ = torch.complex(plain, plain.flip(0))
    return {
        "wide": plain.double() / 3,
        "count": torch.tensor(seed / 3, dtype=torch.float64),
        "eight": plain.to(torch.float8_e4m3fn),
        "scale": plain.abs().to(torch.float8_e8m0fnu),
        "strided": plain[:, ::2],
        "rows": plain[:, :3],
        "turned": plain.T,
        "expanded": plain[:1, :1].expand(4, 5),
        "conjugate": complex_.conj(),
        "negated": complex_.clone().conj().imag,
    }


class Collection(nn.Module):
    """Keeps all of them as buffers, and those that both engines shard on a CPU also as frozen parameters."""

    def __init__(self, seed):
        super().__init__()
        self.inner = mlp(seed)
        frozen = odd_tensors(seed + 100)
        self.frozen = nn.ParameterDict({name: nn.Parameter(frozen[name], requires_grad=False) for name in FROZEN})
        for name, value in odd_tensors(seed).items():
            self.register_buffer(name, value)

    def forward(self, **batch):
        return self.inner(**batch)


DRIFTED = ("count", "eight", "conjugate")
"""Buffers that differ between ranks until an evaluation, which takes the mean, or rank 0's where there is none."""
FROZEN = ("wide", "strided", "rows", "turned", "expanded", "conjugate", "negated")


def odd(backend, root):
    """Saved by one engine, in its model and in the user's state, loaded by the other, exported by it, from the
    checkpoint and a copy."""
    with unishard.prepare(Collection(1), config(backend)) as engine:
        train(engine, own_share(1))
        for name in DRIFTED if my_rank() else ():
            getattr(engine.module, name).copy_(torch.zeros(()))
        folder = engine.save(f"{root}/runs", state=odd_tensors(7))
        engine.export(f"{root}/online", dtype="fp32")
    with unishard.prepare(Collection(2), config(OTHER[backend])) as engine:
        resumed = engine.load(folder, verify="bits")
        engine.eval()
        expected = odd_tensors(1)
        expected |= {
            name: (expected[name].to(torch.float64) / 2).to(expected[name].dtype) for name in ("count", "eight")
        }
        expected |= {f"frozen.{name}": value for name, value in odd_tensors(101).items() if name in FROZEN}
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers() if name in expected}
        shards = {
            name: engine.weights.read(name).cpu()
            for name in expected
            if name.startswith("frozen.") and "conj" not in name
        }
    assert resumed.notes == ()
    assert [name for name, value in buffers.items() if hash_of(value) != hash_of(expected[name])] == []
    assert [name for name, value in shards.items() if not torch.equal(value, expected[name].float())] == []
    assert [name for name, value in odd_tensors(7).items() if hash_of(resumed.state[name]) != hash_of(value)] == []
    return str(folder)


@in_turn
def test_every_dtype_and_layout_is_saved_loaded_exported_and_converted(backend, root):
    folder, copy, exported = Path(on_ranks(odd, backend, root)[0]), Path(root, "copy"), Path(root, "exported")
    facts = manifest.read(folder)
    assert damaged(folder, facts) == hashes_of(folder, facts) == []
    assert not compare(folder, folder).values
    convert(folder, copy)
    names = [name for name in facts.tensors if name.startswith(("model.", "optim."))]
    assert manifest.read(copy).tensors == {name: facts.tensors[name] for name in names}
    export_checkpoint(copy, exported, "fp32")
    online, offline = (place / "model.safetensors" for place in (Path(root, "online"), exported))
    assert online.read_bytes() == offline.read_bytes()


class Quarters(torch.optim.SGD):
    """Keeps state that torch cannot copy."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["quarters"] = torch.empty(parameter.shape, dtype=torch.uint4)


@in_ranks(cells=EACH, in_turn=True)
def test_state_that_cannot_be_saved_is_named_at_the_call(backend, root):
    """A state of the optimizer's own, not when it is written."""
    folder, cfg = Path(root, "none"), config(backend, "no_shard", optimizer=None)
    with unishard.prepare(mlp(), cfg, lambda found: Quarters(found, lr=0.1)) as engine:
        train(engine, own_share(1))
        assert "quarters is torch.uint4, which cannot be saved" in refused(engine.save, folder)
    assert not folder.exists()


NONSENSE = {
    "data has 3 entries for 2 ranks": {"data": [None] * 3},
    "data.1 is 'x'": {"data": [None, "x"]},
    "data.0 is {'loader': 'unishard.dataloader'}": {"data": [{"loader": "unishard.dataloader"}, None]},
    "optimizer.groups.0.options.lr is 'x'": {"lr": "x"},
    "which this version cannot decode": {"data": [{"$tensor": ["float32", []]}, None]},
    "training": {"config": {"training": [3]}},
}


@in_ranks(cells=EACH, in_turn=True)
def test_a_manifest_that_does_not_fit_together_is_one_error_on_every_rank(backend, root):
    """Edited in ways that its own checks allow."""
    with prepare(config(backend)) as engine:
        train(engine, own_share(1))
        folder = engine.save(root)
        sound = (folder / manifest.FILE).read_text()
        for part, said in NONSENSE.items():
            facts = json.loads(sound)
            del facts["crc32"]
            facts["optimizer"]["groups"][0]["options"] |= {"lr": said["lr"]} if "lr" in said else {}
            dist.barrier()
            (folder / manifest.FILE).write_text(
                json.dumps(facts | {key: each for key, each in said.items() if key != "lr"})
            )
            dist.barrier()
            if "config" in said:
                assert engine.load(folder).step == 1, "a config that cannot be read is not needed"
            else:
                told = refused(engine.load, folder)
                assert told.startswith("CheckpointError: ")
                assert part in told


# -- schedules -------------------------------------------------------------------------------------


class Odd:
    """Holds what no file can."""

    def __init__(self):
        self.lock = object()

    def __call__(self, updates):
        return 1.0


@in_ranks(cells=EACH, in_turn=True)
def test_a_scheduler_goes_on_with_all_that_it_writes_and_says_what_counts(backend, root):
    """A schedule that writes betas beside the rate, gone on with by the other engine; one with another rate; one that
    cannot be saved."""

    def built(kind, which, lr=0.01):
        cfg = config(kind, "no_shard", optimizer=None)
        return unishard.prepare(mlp(), cfg, lambda found: torch.optim.AdamW(found, lr=lr), which)

    def cycle(optimizer):
        return OneCycleLR(optimizer, max_lr=0.02, total_steps=20)

    with built(backend, cycle) as engine:
        train(engine, own_share(3))
        folder = engine.save(f"{root}/cycle")
        expected = losses_of(engine, own_share(3))
    with built(OTHER[backend], cycle) as engine:
        assert engine.load(folder).notes == ()
        assert losses_of(engine, own_share(3)) == pytest.approx(expected, rel=1e-5)
    with built(backend, lambda optimizer: StepLR(optimizer, 2)) as engine:
        folder = engine.save(f"{root}/stairs")
    with built(backend, lambda optimizer: StepLR(optimizer, 2), lr=0.5) as engine:
        assert engine.load(folder).notes == (
            "group 0 of the optimizer: initial_lr is 0.5 in the config; the scheduler continues with the saved 0.01",
        )
        assert engine.lr == 0.01
    with built(backend, lambda optimizer: LambdaLR(optimizer, Odd())) as engine:
        assert "LambdaLR cannot be saved: " in refused(engine.save, f"{root}/odd")


# -- what fits in part, and calls at odd times -----------------------------------------------------


class Grown(nn.Module):
    """One layer, or two."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(layers)
        self.layers = nn.ModuleList([nn.Linear(13, 13) for _ in range(layers)])
        self.out = nn.Linear(13, 11)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        logits = self.out(x)
        return MlpOutput(functional.cross_entropy(logits, labels), logits)


@in_ranks(cells=EACH, in_turn=True)
def test_what_fits_of_a_model_that_grew_is_taken_and_the_rest_begins_anew(backend, root):
    """A model that has a layer more than the checkpoint, and then one less."""
    groups = "the parameter groups differ from the saved ones; using the learning rates of the config"
    for before, after, said, count in (
        (1, 2, "layers.1.weight: not in the checkpoint", 6),
        (2, 1, "in the checkpoint, but not in the model", 4),
    ):
        with unishard.prepare(Grown(before), config(backend, optimizer=ADAMW)) as engine:
            train(engine, own_share(2))
            folder = engine.save(f"{root}/{before}")
            kept = engine.weights.read("layers.0.weight")
        with unishard.prepare(Grown(after), config(OTHER[backend], "shard_grad_op", optimizer=ADAMW)) as engine:
            notes = engine.load(folder, strict=False).notes
            assert said in (notes[0] if after == 2 else "\n".join(notes))
            assert after == 1 or groups in notes
            assert torch.equal(kept, engine.weights.read("layers.0.weight"))
            train(engine, own_share(1))
            saved = manifest.read(engine.save(f"{root}/{before}-on")).tensors
        assert len([name for name in saved if name.endswith(".step")]) == count


@in_ranks(cells=EACH, in_turn=True)
def test_calls_at_odd_times_are_one_clear_error_and_nothing_of_a_former_load_stays(backend, root):
    """Inside `frozen`, between forward and backward, with a word that is none, with arguments that differ, after
    another load."""
    data = [{"x": torch.randn(13), "labels": torch.tensor(index % 11)} for index in range(24)]
    cfg = checked(backend, "no_shard")
    with prepare(cfg) as engine:
        start = engine.save(root)
        for micro_batch in engine.batches(unishard.dataloader(data, cfg)):
            update(engine, micro_batch)
            break
        later = engine.save(root)
    with prepare(cfg) as engine:
        with engine.weights.frozen():
            for call, place in (("save", root), ("load", later)):
                told = refused(getattr(engine, call), place)
                assert told.startswith(f"ContractError: {call} was called inside engine.weights.frozen()")
        engine(**own_share(1)[0])
        assert refused(engine.load, later).startswith(
            "ContractError: load would change a parameter that the backward of an earlier forward still needs"
        )
        engine.discard()
        told = refused(engine.load, later, verify="bit")
        assert told == 'ContractError: load: verify is \'bit\'; pass "files", "bits", or None for no check'
        engine.load(later)
        engine.load(start)
        assert len(train(engine, unishard.dataloader(data, cfg))) == 6
        with pytest.MonkeyPatch.context() as patch:
            if not my_rank():
                patch.setattr(snapshot, "stored_assets", stopped(KeyError("of a library that has changed")))
            told = refused(engine.save, root)
            assert told.startswith("CheckpointError: rank 0: KeyError: 'of a library")
        assert refused(engine.load, later, strict=bool(my_rank())).startswith("RankMismatchError: ")
