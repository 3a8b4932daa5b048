"""QLoRA in other frameworks on both engines: figures are those of the framework in one process with bitsandbytes."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from unishard.testing import run_ranks

if missing := [name for name in ("peft", "bitsandbytes", "accelerate", "trl", "lightning") if find_spec(name) is None]:
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)

import quantized_programs as programs

PROGRAMS = {
    "transformers": (programs.with_a_trainer, ("transformers",)),
    "trl": (programs.with_a_trainer, ("trl",)),
    "accelerate": (programs.with_accelerate, ()),
    "lightning": (programs.with_lightning, ()),
}
FIRST = {"transformers": "fsdp", "trl": "deepspeed", "accelerate": "deepspeed", "lightning": "fsdp"}
CELLS = [
    pytest.param(framework, backend, marks=[] if FIRST[framework] == backend else [pytest.mark.deep])
    for framework in PROGRAMS
    for backend in ("fsdp", "deepspeed")
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantized")
    programs.write_base(folder / "base")
    return folder


@pytest.fixture(scope="module")
def played(root, request):
    """What each rank of the runs that are chosen has found, by framework and backend; they share processes."""
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    cells = {(each["framework"], each["backend"]) for each in chosen}
    found = {}
    for world, here in ((1, {(framework, "plain") for framework, _ in cells}), (2, cells)):
        runs = tuple((*cell, str(root / "base"), _folder(root, *cell)) for cell in sorted(here))
        ranks = run_ranks(world, _played, runs, world, timeout=300 * len(runs))
        found |= {run[:2]: [rank[place] for rank in ranks] for place, run in enumerate(runs)}
    return found


def _played(runs, world):
    return [_run(*run, world) for run in runs]


def _run(framework, *given):
    program, more = PROGRAMS[framework]
    with mock.patch.dict(os.environ):  # from which Lightning's teardown removes the number of ranks
        return program(*more, *given)


def _folder(root, framework, backend):
    return str(root / f"{framework}-{backend}")


@pytest.mark.parametrize(("framework", "backend"), CELLS)
def test_it_trains_resumes_and_saves_adapters_as_in_one_process(framework, backend, played, root):
    (expected,) = played[framework, "plain"][0]
    assert len(expected) == 2 * programs.UPDATES
    for runs in played[framework, backend]:
        for run in runs:
            assert run == pytest.approx(expected, rel=1e-5)
    base, folders = root / "base", (_folder(root, framework, each) for each in ("plain", backend))
    plain, ours = (programs.loss_with(base, f"{folder}/adapters") for folder in folders)
    assert ours == pytest.approx(plain, rel=1e-5)
