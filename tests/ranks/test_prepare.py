"""What runs after `prepare` is what was asked."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import traceback
import weakref
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from forking import in_a_fork
from harness import EACH, curve, in_ranks, my_rank, own_share, prepare, refused, run_script, train
from harness.training import BACKENDS, PAIRS, config, everyones

import unishard
from unishard.contract import registry, tested_versions
from unishard.testing import oracle
from unishard.testing.models import mlp

# -- what trains -----------------------------------------------------------------------------------


def windows():
    return [everyones(turn, turn + 1, world=2) for turn in range(4)]


@in_ranks(cells=PAIRS)
def test_rank_0s_model_and_buffers_are_trained_whatever_the_other_ranks_drew(backend, strategy):
    wanted = oracle.train(mlp(seed=7), windows(), config(backend), world=2)
    model = mlp(seed=7 + my_rank())
    model.center += my_rank()
    with unishard.prepare(model, config(backend, strategy)) as engine:
        found = curve(train(engine, own_share(4)))
    assert found.losses == pytest.approx(wanted.losses, rel=2e-6)
    assert found.norms == pytest.approx(wanted.norms, rel=2e-5)


@in_ranks(cells=PAIRS)
def test_a_closed_engine_leaves_nothing_on_the_device_when_the_next_is_prepared(backend, strategy):
    def trained():
        model = mlp()
        with unishard.prepare(model, config(backend, strategy)) as engine:
            train(engine, own_share(2))
        return [weakref.ref(each) for each in (*model.parameters(), model, engine)]

    gc.disable()  # which runs when it likes
    try:
        before = trained()
        with (
            mock.patch.object(torch.cuda, "is_initialized", return_value=True),
            mock.patch.object(torch.cuda, "memory_allocated", return_value=1),
            unishard.prepare(mlp(), config(backend, strategy)),
        ):
            assert [each() for each in before] == [None] * len(before)
    finally:
        gc.enable()


# -- the check after prepare -----------------------------------------------------------------------


LEFT_OPEN = []


class Lying:
    """A backend whose engine says it holds something else."""

    def __init__(self, backend, later=0, **lie):
        self._backend, self._later = backend, later
        self._lie = lie

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def build(self, *args):
        adapter = self._backend.build(*args)
        told, close = adapter.placement()._replace(**self._lie), adapter.close
        adapter.placement = lambda: told
        shard, later = adapter.master_shard, self._later
        adapter.master_shard = lambda each: (held := shard(each))._replace(start=held.start + later)
        adapter.close = lambda: (LEFT_OPEN.remove(adapter), close())
        LEFT_OPEN.append(adapter)
        return adapter


LIES = {
    "engine": ({"engine": "Imposter"}, "engine: expected", "got Imposter"),
    "units": (
        {"units": ("blocks.0", "blocks.2")},
        "sharded units: expected inp, blocks.0, blocks.1, blocks.2, head",
        "got blocks.0, blocks.2",
    ),
    "no units": ({"units": ()}, "sharded units: expected inp, blocks.0, blocks.1, blocks.2, head", "got none"),
    "masters": (
        {"master_dtypes": frozenset({"bfloat16"})},
        "dtype of the master weights: expected float32",
        "got bfloat16",
    ),
    "whole": ({"master_numel": 6013}, "master weights on this rank: expected at most", "got 6,013"),
    "whole parameters": ({"param_bytes": 4 * 6013}, "parameters on this rank: expected at most", "got 24,052"),
    "nothing": ({"master_numel": 0}, "master weights on this rank: expected at least", "got 0"),
    "elements": ({"later": 1}, "elements of inp.weight on this rank: expected ", ", got "),
}


def lying(backend, lie, ranks, versions="", **sections):
    """What `prepare` says where an engine lies on these ranks."""
    honest, told = registry.get(backend), LIES[lie][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "get", lambda name: Lying(honest, **told) if my_rank() in ranks else honest)
        patch.setattr(tested_versions, "untested", lambda of: versions)
        return refused(lambda cfg: prepare(cfg).close(), config(backend, **sections))


@in_ranks(cells=tuple(product(BACKENDS, LIES)), in_turn=True)
def test_an_engine_that_does_not_run_what_was_asked_is_refused_and_closed(backend, lie):
    raised = lying(backend, lie, (0, 1))
    assert raised.startswith("EngineMismatchError: ")
    for part in LIES[lie][1:]:
        assert part in raised
    assert LEFT_OPEN == []


@in_ranks(cells=EACH, in_turn=True)
def test_an_untested_version_may_cut_otherwise_unless_the_optimizer_is_told_how(backend):
    assert lying(backend, "elements", (0, 1), versions="new") == "nothing"
    assert "elements of " in lying(backend, "elements", (0, 1), versions="new", optimizer="muon")


@in_ranks(cells=EACH, in_turn=True)
def test_a_difference_on_one_rank_is_an_error_on_every_rank(backend):
    raised = lying(backend, "masters", (1,))
    assert raised.startswith("EngineMismatchError: ")
    assert "got bfloat16" in raised


# -- a plain script --------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
import torch
import unishard
from unishard.testing.models import batch, mlp

cfg = unishard.Config.model_validate({"backend": sys.argv[1], "sharding": sys.argv[2], "precision": sys.argv[3]})
engine = unishard.prepare(mlp(), cfg)
for batch in engine.batches([batch("mlp", index, 1) for index in range(3)]):
    loss = engine(**batch).loss
    engine.backward(loss)
    step = engine.step()
print("updated", step.updated, "on", torch.distributed.get_world_size())
"""


PLAIN = (
    ("fsdp", "no_shard", "fp32"),
    ("fsdp", "full_shard", "bf16"),
    ("deepspeed", "shard_optimizer", "bf16"),
    ("deepspeed", "full_shard", "fp32"),
)


def each_in_a_fork(script):
    """Exit codes of the script by cell."""
    os.environ.pop("DS_ACCELERATOR", None)
    codes = []
    for number, cell in enumerate(PLAIN):
        process = os.fork()
        if process == 0:
            for stream, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{script}.{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
            sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
            try:
                run_script(script, *cell)
            except BaseException:
                traceback.print_exc()
            ctypes.pythonapi.Py_Exit(0)  # as any interpreter ends, with all that this frees
        codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    return codes


@pytest.fixture(scope="module")
def plain_scripts(tmp_path_factory):
    """Exit code, stdout and stderr of the script by cell; in forks, since importing costs more than the rest."""
    script = tmp_path_factory.mktemp("plain") / "train.py"
    script.write_text(SCRIPT)
    codes = in_a_fork(each_in_a_fork, str(script))
    texts = [
        tuple(Path(f"{script}.{number}.{name}").read_text() for name in ("out", "err")) for number in range(len(PLAIN))
    ]
    return {cell: (code, *said) for cell, code, said in zip(PLAIN, codes, texts, strict=True)}


@pytest.mark.parametrize("cell", PLAIN, ids="-".join)
def test_a_plain_script_trains_as_one_rank_and_ends_cleanly_without_closing(cell, plain_scripts):
    code, printed, errors = plain_scripts[cell]
    assert code == 0, errors
    assert printed.splitlines()[-1] == "updated True on 1"
    assert "terminate called" not in errors
    assert "Traceback" not in errors
    assert "Warning" not in errors
