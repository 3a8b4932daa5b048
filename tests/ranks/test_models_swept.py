"""Some of the models that `make models` trains, with a part of their runs; and its page, docs/models-tested.md."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from harness import DEEP
from models import CASES
from models.page import beyond
from models.runs import Run
from models.sweep import attempt

from unishard.testing.cells import BACKENDS

PAGE = Path(__file__).parents[2] / "docs/models-tested.md"
SOME = (
    *("gpt2", "mixtral", "lfm2", "bart", "swin", "clip", "BatchNorm", "weights tied across units"),
    *("a block that is used three times", "blocks in another order in each update"),
)


def _runs(number: int) -> list[Run]:
    """In fp32 a run that saves and exports, and in turn one that resumes it on the other engine or, in bf16, a run on
    that one."""
    one, other = (BACKENDS, BACKENDS[::-1])[number // 2 % 2]
    more = [
        Run(other, ("shard_grad_op", "shard_optimizer", "no_shard")[number // 2 % 3], "fp32", resumes=one),
        Run(other, "full_shard", "bf16"),
    ]
    return [Run(one, "full_shard", "fp32"), *(more if DEEP else more[number % 2 :][:1])]


@cache
def _found():
    with TemporaryDirectory() as folder:
        return attempt({name: _runs(number) for number, name in enumerate(SOME)}, folder)


@pytest.mark.parametrize("name", SOME)
def test_a_model_trains_as_in_plain_torch_and_is_exported_as_transformers_saves_it(name):
    records = _found()[name]
    assert [record["run"] for record in records] == [str(run) for run in _runs(SOME.index(name))]
    for record in records:
        assert beyond(record) is None, f"{record['run']}: {beyond(record)}"


def test_the_page_has_most_models_and_none_is_beyond_its_bounds_without_a_cause():
    rows = [
        re.split(r" (?<!\\)\| ", line.strip("| "))
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    names = [name for name, *_ in rows if name != "Model"]
    assert names == [name for name in CASES if name in names], "run make models"
    assert len(names) > len(CASES) // 2
    for name, *cells in rows:
        assert any(cells), f"{name} has no figures"
        known = name == "Model" or CASES[name].known
        assert known or not any("**" in cell for cell in cells), f"{name}: {cells}"
