"""Lightning's Fabric on both engines, against its own DDP."""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from harness import DEEP

from unishard.testing import run_ranks
from unishard.testing.cells import BACKENDS

if find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)

import fabric_programs as programs

pytestmark = pytest.mark.ranks

CELLS = [
    pytest.param(backend, sharding, marks=[pytest.mark.deep] * (turn in (1, 2)))
    for turn, (backend, sharding) in enumerate(product(BACKENDS, ("full_shard", "shard_grad_op")))
]


@cache
def plain():
    return run_ranks(2, programs.train, "plain", None)[0]


def compare(found, expected):
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-6), name


@pytest.mark.parametrize(("backend", "sharding"), CELLS)
def test_figures_are_those_of_ddp(backend, sharding):
    compare(run_ranks(2, programs.train, backend, sharding)[0], plain())


@pytest.mark.parametrize(("first", "second"), [pytest.param(*BACKENDS, marks=pytest.mark.deep), BACKENDS[::-1]])
def test_a_checkpoint_loads_on_the_other_engine(first, second, tmp_path):
    folder = str(tmp_path / "kept")
    begun = run_ranks(2, programs.train, first, "full_shard", folder, None, 1)[0]
    assert [path.name for path in (tmp_path / "kept" / "model").glob("step-*")] == ["step-00000005"]
    rest = run_ranks(2, programs.train, second, "shard_grad_op", None, folder, 2)[0]
    joined = {name: begun[name] + rest[name] for name in ("losses", "norms")}
    compare(rest | joined, plain())


@pytest.mark.parametrize("backend", BACKENDS if DEEP else BACKENDS[:1])
def test_a_scheduler_of_groups_steps_layers_that_ranks_have_together(backend):
    found, expected = run_ranks(2, programs.layers_together, backend)[0], programs.layers_together(None)
    for update, plainly in zip(found, expected, strict=True):
        assert update == pytest.approx(plainly, rel=1e-6)


@pytest.mark.parametrize("names", [True, False], ids=["named", "found"])
def test_each_of_two_models_has_its_engine(names):
    expected = run_ranks(2, programs.two_models, "plain", names)[0]
    for backend in BACKENDS if DEEP else BACKENDS[names:][:1]:
        assert run_ranks(2, programs.two_models, backend, names)[0] == pytest.approx(expected, rel=1e-6)


REFUSED = {
    "two optimizers": "optimizer: 2 optimizers for one module; an engine has one, with parameter groups",
    "apart": "set the optimizer up with its model: model, optimizer = fabric.setup(model, optimizer)",
    "by value": "clip_val=1.0 has no equal on engines; pass max_norm; engines clip by the norm of all gradients",
    "norm type": "norm_type=1 has no equal on engines; remove it",
    "no model": "put the model into the state: fabric.save writes checkpoints of engines",
    "filter": "pass no filter: fabric.save writes checkpoints of engines",
    "optimizer of a file": "AdamW.load_state_dict() would not reach the engine's shards",
    "precision": "precision: is 32-true in Lightning's words, but Lightning was given 16-true; remove its argument",
    "missing": "kept has no more; pass strict=False",
    "infinite": "the norm of the gradients is nan; pass error_if_nonfinite=False to skip",
    "zero": "SGD.zero_grad() was called after 1 of 1 backward calls of the accumulation window, and would drop",
    "both models": "the loss reaches the parameters of 2 models, not of one",
    "inference": "0 models are trained here; set a model up with its optimizer",
}


@cache
def refusals(folder):
    return run_ranks(1, programs.refusals, folder)[0]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "refusals-of-fabric"
    folder.mkdir(exist_ok=True)
    assert REFUSED[case] in refusals(str(folder))[case]
