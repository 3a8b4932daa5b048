"""A damaged checkpoint is one error on every rank of an engine that trains, which then trains on as if nobody had tried
to load it."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKENDS, DEEP, config, curve, my_rank, own_share, play, refused, train, values
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import StepLR

import unishard
from unishard.checkpoint import manifest, metadata
from unishard.checkpoint.tensor_reader import Tensors
from unishard.testing.models import mlp

WEIGHT, MOMENT = "model.inp.weight", "optim.state.inp.weight.exp_avg"


def edited(change):
    """Another manifest, without the checksum: whoever writes the file can write that too."""

    def damage(folder):
        facts = json.loads((folder / manifest.FILE).read_text())
        del facts["crc32"]
        change(facts)
        (folder / manifest.FILE).write_text(json.dumps(facts))

    return damage


def rewritten(name, change, *, known=True):
    """Another file, of which the manifest has the size and the checksum where it is `known`."""

    def damage(folder):
        new = change((folder / name).read_bytes())
        (folder / name).write_bytes(new)
        if known:
            edited(lambda facts: facts["files"][name].update(bytes=len(new), crc32=f"{zlib.crc32(new):08x}"))(folder)

    return damage


def index_with(change):
    """torch's index, changed."""

    def damage(data):
        index = pickle.loads(data)
        change(index)
        return pickle.dumps(index)

    return rewritten(metadata.FILE, damage)


def shaped(name, *shape):
    """The index says another shape of a tensor, in one chunk."""

    def change(index):
        entry, box = index.state_dict_metadata[name], torch.Size(shape)
        entry.size, entry.chunks = box, [ChunkStorageMetadata(torch.Size([0] * len(shape)), box)]
        index.storage_data[MetadataIndex(name, entry.chunks[0].offsets)] = places_of(index, name)[0]

    return index_with(change)


def places_of(index, name):
    return [place for at, place in index.storage_data.items() if at.fqn == name]


def placed(name=WEIGHT, **values):
    """The index says another place of the last record of a tensor."""

    def change(index):
        for field, value in values.items():
            setattr(places_of(index, name)[-1], field, value)

    return index_with(change)


def outside(folder):
    """The tensors of a rank are a link to the same file elsewhere."""
    (folder / "__1_0.distcp").rename(folder.parent / f"{folder.name}.distcp")
    (folder / "__1_0.distcp").symlink_to(folder.parent / f"{folder.name}.distcp")


def half(data):
    return data[: len(data) // 2]


def at(*path, value):
    """Sets one value of the manifest."""

    def change(facts):
        for key in path[:-1]:
            facts = facts[key]
        facts[path[-1]] = value

    return change


def without(*path):
    def change(facts):
        for key in path[:-1]:
            facts = facts[key]
        del facts[path[-1]]

    return change


RANDOM = "rng.rank00001.torch"
INDEX = metadata.FILE
DAMAGES = {
    "a truncated manifest": rewritten(manifest.FILE, half, known=False),
    "a list as a manifest": rewritten(manifest.FILE, lambda data: b"[]", known=False),
    "a text as a step": edited(at("step", value="x")),
    "a huge step": edited(at("step", value=2**63)),
    "a huge shape in the manifest": edited(at("tensors", WEIGHT, "shape", value=[2**40, 2**20])),
    "another shape in the manifest": edited(at("tensors", WEIGHT, "shape", value=[13, 16])),
    "a tensor that the manifest lacks": edited(without("tensors", WEIGHT)),
    "an optimizer that the manifest lacks": edited(at("optimizer", value=None)),
    "a file outside": edited(at("files", value={"../latest": {"bytes": 1, "crc32": "00000000"}})),
    "a tensor of the state that is missing": edited(at("state", value={"ema": {"$tensor": "state.none"}})),
    "a state that nobody wrote": edited(at("state", value={"$int": "x"})),
    "a scheduler that nobody saved": edited(at("schedule", "torch", "state", value="x")),
    "another schedule, at an earlier update": edited(at("schedule", "torch", value=None)),
    "tensors behind a link": outside,
    "truncated tensors": rewritten("__1_0.distcp", half, known=False),
    "truncated tensors that the manifest knows": rewritten("__1_0.distcp", half),
    "no tensors": lambda folder: (folder / "__1_0.distcp").unlink(),
    "no index": lambda folder: (folder / INDEX).unlink(),
    "a truncated index": rewritten(INDEX, half, known=False),
    "a truncated index that the manifest knows": rewritten(INDEX, half),
    "an index of text": rewritten(INDEX, lambda data: pickle.dumps("x")),
    "a tensor that the index lacks": index_with(lambda index: index.state_dict_metadata.pop(WEIGHT)),
    "a record that the index lacks": index_with(lambda index: index.storage_data.clear()),
    "another shape in the index": shaped(WEIGHT, 13, 16),
    "a huge shape in the index": shaped(WEIGHT, 2**40),
    "a state of another shape": shaped(MOMENT, 1),
    "a file of the index outside": placed(relative_path="../a"),
    "a record beyond the file": placed(offset=2**40),
    "a record of huge length": placed(length=2**62),
    "a record of no length": placed(length=0),
    "a record in a file that is not there": placed(relative_path="__77_0.distcp"),
    "a record of the optimizer beyond the file": placed(MOMENT, offset=2**40),
    "random numbers of another shape": shaped(RANDOM, 3),
}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def halved(optimizer):
    return StepLR(optimizer, 2, gamma=0.5)


def held(engine):
    """This rank's master weights, optimizer state and random numbers, copied."""
    tensors = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    tensors += [
        value
        for state in engine.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    tensors = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    options = [
        {name: value for name, value in group.items() if name != "params"} for group in engine.optimizer.param_groups
    ]
    return [tensor.detach().clone() for tensor in tensors], torch.get_rng_state(), random.getstate(), repr(options)


def same(one, other):
    return (
        len(one[0]) == len(other[0])
        and all(map(torch.equal, one[0], other[0]))
        and torch.equal(one[1], other[1])
        and one[2:] == other[2:]
    )


def loads(backend, root, damages):
    """Trains, saves, trains on, tries to load what each damage leaves, and trains on: errors, what changed, and
    losses."""
    told, changed = {}, []
    with unishard.prepare(mlp(), config(backend, optimizer=None), adamw, halved) as engine:
        train(engine, own_share(1))
        sound = engine.save(f"{root}/{backend}-{len(damages)}", state={"note": torch.arange(3)})
        train(engine, own_share(1))
        before = held(engine)
        for number, name in enumerate(damages):
            folder = Path(f"{root}/{backend} {number}/step-00000001")
            if my_rank() == 0:
                shutil.copytree(sound, folder)
                DAMAGES[name](folder)
            dist.barrier()
            told[name] = refused(engine.load, folder)
            if not same(before, held(engine)):
                changed.append(name)
                before = held(engine)
        return told, changed, [(loss, step.grad_norm, step.lr) for loss, step in train(engine, own_share(3))]


def unreadable(folder):
    """Only who reads the last shard of the weight can see that it holds zeros in place of a tensor."""
    *_, shard = Tensors(folder)._chunks(WEIGHT, 0, 23 * 13)
    rewritten(shard.file, lambda data: data[: shard.at] + bytes(shard.length) + data[shard.at + shard.length :])(folder)


def loads_halfway(backend, root):
    """Loads what fails when some weights are loaded, and then what was saved: the error, and losses with and without
    it."""
    with unishard.prepare(mlp(), config(backend, optimizer=None), adamw, halved) as engine:
        train(engine, own_share(1))
        sound = engine.save(f"{root}/{backend}-halfway")
        expected = curve(train(engine, own_share(2)))
        if my_rank() == 0:
            shutil.copytree(sound, f"{root}/{backend} halfway/step-00000001")
            unreadable(Path(f"{root}/{backend} halfway/step-00000001"))
        dist.barrier()
        told = refused(engine.load, f"{root}/{backend} halfway/step-00000001")
        engine.load(sound)
        return told, curve(train(engine, own_share(2))) == expected


TRIED = BACKENDS if DEEP else ("deepspeed",)
"""Whose shards are not those of FSDP2, with which the other tests of damage save."""


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("damaged"))
    scenarios = {(backend, "halfway"): (loads_halfway, (backend, root)) for backend in TRIED}
    scenarios |= {
        (backend, tried): (loads, (backend, root, tuple(DAMAGES) if tried else ()))
        for backend in TRIED
        for tried in (False, True)
    }
    return lambda *which: values(play(tuple(scenarios.values()))[scenarios[which]])


@pytest.mark.parametrize("backend", TRIED)
def test_every_damage_is_one_error_and_leaves_the_engine_alone(played, backend):
    first, *others = [told for told, _, _ in played(backend, True)]
    assert {name: said for name, said in first.items() if not said.startswith("CheckpointError: ")} == {}
    assert others == [first]
    assert [changed for _, changed, _ in played(backend, True)] == [[], []]


@pytest.mark.parametrize("backend", TRIED)
def test_the_engine_trains_on_as_one_that_never_tried(played, backend):
    assert [losses for *_, losses in played(backend, True)] == [losses for *_, losses in played(backend, False)]


@pytest.mark.parametrize("backend", TRIED)
def test_an_error_after_some_weights_are_loaded_says_so_and_another_load_mends_it(played, backend):
    for told, mended in played(backend, "halfway"):
        assert told.startswith("CheckpointError: ")
        assert told.endswith("; some weights are loaded already: load another checkpoint before you train on")
        assert mended
