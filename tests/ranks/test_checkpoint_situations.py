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
from playing import checked, config, in_turn, my_rank, on_ranks, own_share, prepare, refused, train
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import unishard
from unishard.checkpoint import finding, manifest
from unishard.checkpoint.comparing import compare
from unishard.checkpoint.convert import convert
from unishard.checkpoint.export.offline import export_checkpoint
from unishard.checkpoint.hashing import hash_of
from unishard.checkpoint.verifying import damaged, hashes_of
from unishard.engine.state import snapshot
from unishard.testing.models import MlpOutput, mlp

OTHER = {"fsdp": "deepspeed", "deepspeed": "fsdp"}
ADAMW = {"name": "adamw", "lr": 1e-2}
PURE = {"compute": "bf16", "master": "bf16"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("situations"))


# -- several engines in one process ----------------------------------------------------------------


def two_engines(backend, root):
    """Both save in the background after every update, each into its own directory."""
    cfgs = [
        config(backend, checkpoint={"dir": f"{root}/{backend}-{name}", "async_save": True, "every_steps": 1})
        for name in "ab"
    ]
    with prepare(cfgs[0]) as first, prepare(cfgs[1]) as second:
        for micro_batch in own_share(4):
            for engine in (first, second):
                engine.backward(engine(**micro_batch).loss)
                engine.step()
        told = refused(second.save, cfgs[0].checkpoint.dir)
    with prepare(cfgs[0]) as again:
        return told, again.load().step, refused(again.save)


@in_turn
def test_two_engines_save_beside_each_other_and_not_in_one_directory(backend, root):
    for told, step, again in on_ranks(two_engines, backend, root):
        assert "another engine of this process saves in" in told
        assert step == 4
        assert again == "nothing"
        for name in "ab":
            assert [found.step for found in finding.checkpoints(Path(root) / f"{backend}-{name}")] == [1, 2, 3, 4]


def signalled(backend, root):
    """Two engines wait for the same signal; the second is closed after the first, and neither is left in the way."""
    before = signal.getsignal(signal.SIGUSR1)
    cfgs = [
        config(backend, checkpoint={"dir": f"{root}/{backend}-signal-{name}", "on_signal": ["USR1"]}) for name in "ab"
    ]
    first, second = map(prepare, cfgs)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        train(first, own_share(1))
        code = None
    except SystemExit as end:
        code = end.code
    first.close()
    second.close()
    return code, signal.getsignal(signal.SIGUSR1) == before


@in_turn
def test_a_signal_reaches_every_engine_and_is_given_back_in_any_order(backend, root):
    assert on_ranks(signalled, backend, root) == [(85, True)] * 2


def teacher(backend, root):
    """Loads a model that is only evaluated beside one that trains."""
    with prepare(config(backend)) as engine:
        folder = engine.save(f"{root}/{backend}-teacher")
    with unishard.prepare(mlp(3), config(backend), train=False) as engine:
        torch.manual_seed(7)
        expected = torch.rand(1)
        torch.manual_seed(7)
        engine.load(folder)
        return torch.equal(expected, torch.rand(1))


@in_turn
def test_a_load_of_a_model_that_does_not_train_leaves_the_random_numbers_alone(backend, root):
    assert all(on_ranks(teacher, backend, root))


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


def pure(backend, root):
    """From full_shard to shard_grad_op of the other engine in pure bf16, where ranks hold nothing of some
    parameters."""
    cfg = config(backend, optimizer=None, precision=PURE)
    with unishard.prepare(mlp(), cfg, WideMoments) as engine:
        train(engine, own_share(2))
        folder = engine.save(f"{root}/{backend}-pure")
    with unishard.prepare(
        mlp(3), config(OTHER[backend], "shard_grad_op", optimizer=None, precision=PURE), WideMoments
    ) as engine:
        notes = engine.load(folder, verify="bits").notes
        again = engine.save(f"{root}/{backend}-pure-again")
    return notes, manifest.read(folder).tensors, manifest.read(again).tensors


@in_turn
def test_pure_bf16_with_wide_moments_is_the_same_to_the_bit_on_the_other_engine(backend, root):
    for notes, before, after in on_ranks(pure, backend, root):
        assert notes == ()
        assert before["optim.state.inp.weight.moment"].dtype == "float32"
        assert {name: facts for name, facts in before.items() if not name.startswith("rng.")} == {
            name: facts for name, facts in after.items() if not name.startswith("rng.")
        }


def to_fp16(backend, root):
    with prepare(config(backend, precision="bf16")) as engine:
        folder = engine.save(f"{root}/{backend}-fp16")
    with prepare(config(backend, precision="fp16")) as engine:
        before = engine.loss_scale
        engine.load(folder)
        return before, engine.loss_scale


@in_turn
def test_a_run_in_bf16_that_goes_on_in_fp16_begins_with_a_scale(backend, root):
    for before, after in on_ranks(to_fp16, backend, root):
        assert after == before > 1


def empty(backend, root):
    """State with tensors that have no elements."""
    with prepare(config(backend)) as engine:
        folder = engine.save(
            f"{root}/{backend}-empty", state={"none": torch.empty(3, 0, dtype=torch.int16), "raw": b""}
        )
        return engine.load(folder).state


@in_turn
def test_a_saved_tensor_without_elements_comes_back(backend, root):
    for state in on_ranks(empty, backend, root):
        assert (state["none"].shape, state["none"].dtype, state["raw"]) == ((3, 0), torch.int16, b"")


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
"""Buffers that differ between ranks until the save, which stores the mean, or rank 0's where there is none."""
FROZEN = ("wide", "strided", "rows", "turned", "expanded", "conjugate", "negated")


def odd(backend, root):
    """Saved by one engine, in its model and in the user's state, loaded by the other, exported by it, from the
    checkpoint and a copy."""
    with unishard.prepare(Collection(1), config(backend)) as engine:
        train(engine, own_share(1))
        for name in DRIFTED if my_rank() else ():
            getattr(engine.module, name).copy_(torch.zeros(()))
        folder = engine.save(f"{root}/{backend}-odd-tensors", state=odd_tensors(7))
        engine.export(f"{root}/{backend}-odd-online", dtype="fp32")
    with unishard.prepare(Collection(2), config(OTHER[backend])) as engine:
        resumed = engine.load(folder, verify="bits")
        expected = odd_tensors(1)
        expected |= {
            name: (expected[name].to(torch.float64) / 2).to(expected[name].dtype) for name in ("count", "eight")
        }
        expected |= {f"frozen.{name}": value for name, value in odd_tensors(101).items() if name in FROZEN}
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers() if name in expected}
        shards = {
            name: engine.parameter(name).cpu() for name in expected if name.startswith("frozen.") and "conj" not in name
        }
    wrong = [name for name, value in buffers.items() if hash_of(value) != hash_of(expected[name])]
    wrong += [name for name, value in shards.items() if not torch.equal(value, expected[name].float())]
    wrong += [name for name, value in odd_tensors(7).items() if hash_of(resumed.state[name]) != hash_of(value)]
    return wrong, resumed.notes, str(folder)


@in_turn
def test_every_dtype_and_layout_is_saved_loaded_exported_and_converted(backend, root, tmp_path):
    assert [(wrong, notes) for wrong, notes, _ in on_ranks(odd, backend, root)] == [([], ())] * 2
    folder = Path(on_ranks(odd, backend, root)[0][2])
    facts = manifest.read(folder)
    assert damaged(folder, facts) == hashes_of(folder, facts) == []
    assert not compare(folder, folder).values
    convert(folder, tmp_path / "copy")
    names = [name for name in facts.tensors if name.startswith(("model.", "optim."))]
    assert manifest.read(tmp_path / "copy").tensors == {name: facts.tensors[name] for name in names}
    export_checkpoint(tmp_path / "copy", tmp_path / "exported", "fp32")
    files = [Path(root) / f"{backend}-odd-online" / "model.safetensors", tmp_path / "exported" / "model.safetensors"]
    assert files[0].read_bytes() == files[1].read_bytes()


class Quarters(torch.optim.SGD):
    """Keeps state that torch cannot copy."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["quarters"] = torch.empty(parameter.shape, dtype=torch.uint4)


def strange_state(backend, root):
    """A state of the user's or the optimizer's own that cannot be saved is named at the call, not when it is
    written."""
    cfg = config(backend, "no_shard", optimizer=None)
    with unishard.prepare(mlp(), cfg, lambda found: Quarters(found, lr=0.1)) as engine:
        told = [refused(engine.save, f"{root}/{backend}-strange", state={"mask": torch.eye(2).to_sparse()})]
        train(engine, own_share(1))
        return [*told, refused(engine.save, f"{root}/{backend}-strange")]


@in_turn
def test_state_that_cannot_be_saved_is_named_at_the_call(backend, root):
    for mask, quarters in on_ranks(strange_state, backend, root):
        assert "state.mask is torch.sparse_coo" in mask
        assert "quarters is torch.uint4, which cannot be saved" in quarters
    assert not (Path(root) / f"{backend}-strange").exists()


NONSENSE = {
    "data has 3 entries for 2 ranks": {"data": [None] * 3},
    "data.1 is 'x'": {"data": [None, "x"]},
    "data.0 is {'loader': 'unishard.dataloader'}": {"data": [{"loader": "unishard.dataloader"}, None]},
    "optimizer.groups.0.options.lr is 'x'": {"lr": "x"},
    "which this version cannot decode": {"data": [{"$tensor": ["float32", []]}, None]},
    "training": {"config": {"training": [3]}},
}


def nonsense(backend, root):
    """Loads a checkpoint whose manifest was edited in ways that its own checks allow."""
    with prepare(config(backend)) as engine:
        train(engine, own_share(1))
        folder = engine.save(f"{root}/{backend}-nonsense")
        path, told = folder / manifest.FILE, []
        sound = path.read_text()
        for said in NONSENSE.values():
            facts = json.loads(sound)
            del facts["crc32"]
            facts["optimizer"]["groups"][0]["options"] |= {"lr": said["lr"]} if "lr" in said else {}
            dist.barrier()
            path.write_text(json.dumps(facts | {name: value for name, value in said.items() if name != "lr"}))
            dist.barrier()
            told.append(refused(engine.load, folder) if "config" not in said else engine.load(folder).step)
        return told


@in_turn
def test_a_manifest_that_does_not_fit_together_is_one_error_on_every_rank(backend, root):
    for told in on_ranks(nonsense, backend, root):
        assert told.pop() == 1, "a config that cannot be read is not needed"
        for message, part in zip(told, NONSENSE, strict=False):
            assert message.startswith("CheckpointError: ")
            assert part in message


# -- schedules -------------------------------------------------------------------------------------


def scheduled(backend, root):
    """A schedule that writes betas beside the rate, gone on with by the other engine; one with another rate; one that
    cannot be saved."""
    told = {}

    def built(kind, which, lr=0.01):
        cfg = config(kind, optimizer=None)
        return unishard.prepare(mlp(), cfg, lambda found: torch.optim.AdamW(found, lr=lr), which)

    def cycle(optimizer):
        return OneCycleLR(optimizer, max_lr=0.02, total_steps=20)

    with built(backend, cycle) as engine:
        train(engine, own_share(3))
        folder = engine.save(f"{root}/{backend}-cycle")
        expected = [loss for loss, _ in train(engine, own_share(3))]
    with built(OTHER[backend], cycle) as engine:
        told["cycle"] = engine.load(folder).notes, expected, [loss for loss, _ in train(engine, own_share(3))]
    with built(backend, lambda optimizer: StepLR(optimizer, 2)) as engine:
        folder = engine.save(f"{root}/{backend}-stairs")
    with built(backend, lambda optimizer: StepLR(optimizer, 2), lr=0.5) as engine:
        told["stairs"] = engine.load(folder).notes, engine.lr
    with built(backend, lambda optimizer: LambdaLR(optimizer, Odd())) as engine:
        told["odd"] = refused(engine.save, f"{root}/{backend}-odd")
    return told


class Odd:
    """Holds what no file can."""

    def __init__(self):
        self.lock = object()

    def __call__(self, updates):
        return 1.0


@in_turn
def test_a_scheduler_goes_on_with_all_that_it_writes_and_says_what_counts(backend, root):
    for told in on_ranks(scheduled, backend, root):
        notes, expected, again = told["cycle"]
        assert notes == ()
        assert again == pytest.approx(expected, rel=1e-5)
        notes, rate = told["stairs"]
        assert notes == (
            "group 0 of the optimizer: initial_lr is 0.5 in the config; the scheduler continues with the saved 0.01",
        )
        assert rate == 0.01
        assert "LambdaLR cannot be saved: " in told["odd"]


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


def grown(backend, root):
    """A model that has a layer more than the checkpoint, and then one less."""
    told = []
    for before, after in ((1, 2), (2, 1)):
        with unishard.prepare(Grown(before), config(backend, optimizer=ADAMW)) as engine:
            train(engine, own_share(2))
            folder = engine.save(f"{root}/{backend}-grown-{before}")
            kept = engine.parameter("layers.0.weight")
        with unishard.prepare(Grown(after), config(OTHER[backend], "shard_grad_op", optimizer=ADAMW)) as engine:
            notes = engine.load(folder, strict=False).notes
            same = torch.equal(kept, engine.parameter("layers.0.weight"))
            train(engine, own_share(1))
            steps = manifest.read(engine.save(f"{root}/{backend}-grown-{before}-on")).tensors
        told.append((notes, same, {name for name in steps if name.endswith(".step")}, engine))
    return [(notes, same, sorted(steps)) for notes, same, steps, _ in told]


@in_turn
def test_what_fits_of_a_model_that_grew_is_taken_and_the_rest_begins_anew(backend, root):
    for (more, kept, steps), (less, kept_too, fewer) in on_ranks(grown, backend, root):
        assert kept
        assert kept_too
        assert "layers.1.weight: not in the checkpoint" in more[0]
        assert any("in the checkpoint, but not in the model" in note for note in less)
        assert "the parameter groups differ from the saved ones; using the learning rates of the config" in more
        assert (len(steps), len(fewer)) == (6, 4)


def at_odd_times(backend, root):
    """Inside `frozen`, between forward and backward, with a word that is none, with arguments that differ, after
    another load."""
    told = {}
    data = [{"x": torch.randn(13), "labels": torch.tensor(index % 11)} for index in range(24)]
    cfg = checked(backend)
    with prepare(cfg) as engine:
        start = engine.save(f"{root}/{backend}-times")
        for micro_batch in engine.batches(unishard.dataloader(data, cfg)):
            engine.backward(engine(**micro_batch).loss)
            engine.step()
            break
        later = engine.save(f"{root}/{backend}-times")
    with prepare(cfg) as engine:
        with engine.frozen():
            told["frozen"] = refused(engine.save, f"{root}/{backend}-times"), refused(engine.load, later)
        engine(**own_share(1)[0])
        told["graph"] = refused(engine.load, later)
        engine.discard()
        told["word"] = refused(engine.load, later, verify="bit")
        engine.load(later)
        engine.load(start)
        told["batches"] = len(train(engine, unishard.dataloader(data, cfg)))
        assets = snapshot.assets_of
        if not my_rank():
            snapshot.assets_of = lambda *arguments: {}["of a library that has changed"]
        told["assets"] = refused(engine.save, f"{root}/{backend}-times")
        snapshot.assets_of = assets
        told["strict"] = refused(engine.load, later, strict=bool(my_rank()))
    return told


@in_turn
def test_calls_at_odd_times_are_one_clear_error_and_nothing_of_a_former_load_stays(backend, root):
    for told in on_ranks(at_odd_times, backend, root):
        for call, problem in zip(("save", "load"), told["frozen"], strict=True):
            assert problem.startswith(f"ContractError: {call} was called inside engine.frozen()")
        assert told["graph"].startswith(
            "ContractError: load would change a parameter that the backward of an earlier forward still needs"
        )
        assert told["word"] == 'ContractError: load: verify is \'bit\'; pass "files", "bits", or None for no check'
        assert told["batches"] == 6
        assert told["assets"].startswith("CheckpointError: rank 0: KeyError: 'of a library")
        assert told["strict"].startswith("RankMismatchError: ")
