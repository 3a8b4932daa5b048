"""Some of the models that `make models` trains, with a part of their runs; and what it writes, docs/models-tested.csv
and docs/models-tested.md."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from harness import DEEP

from dev.models import CASES, KINDS
from dev.models.exporting import EQUAL
from dev.models.figures import BOUNDS, beyond
from dev.models.joint import DIFFERENT, FAILED, METHODS, RANDOM, outcome, play_joint, runs_with_sequence
from dev.models.joint import EQUAL as SAME
from dev.models.page import environment_of, page, summary
from dev.models.rows import read, rows_of, write
from dev.models.runs import Run, runs_of
from dev.models.sweep import attempt
from unishard.testing.cells import BACKENDS

DOCS = Path(__file__).parents[2] / "docs"
ROWS = read(DOCS / "models-tested.csv")
SOME = (
    *("gpt2", "bart", "a block that is used three times", "blocks in another order in each update"),
    *(("mixtral", "clip", "BatchNorm", "weights tied across units") if DEEP else ()),
)

SOME_SPLIT = (
    # Those are in test_sequence.py and test_hybrid_sequences.py too, and the last one is refused as albert is.
    *(("llama", "gemma3", "gpt_oss", "mixtral", "lfm2", "bert, classifier") if DEEP else ()),
    *("modernbert", "gpt2 with dropout", "albert", "doge", "convbert", "U-Net of a diffusion model"),
)
"""Played with `parallel.sequence`: some that are equal, and some of each kind of refusal."""


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


@cache
def _found_split():
    with TemporaryDirectory() as folder:
        todo = {name: runs_with_sequence(number) for number, name in enumerate(SOME_SPLIT)}
        return attempt(todo, folder, play_joint)


@pytest.mark.parametrize("name", SOME_SPLIT)
def test_a_model_trains_with_long_sequences_as_its_row_says(name):
    (row,) = (row for row in ROWS if row.name == name)
    assert outcome(_found_split()[name]) == row.sequence


def test_no_model_differs_in_silence_with_long_sequences_or_ends_with_an_error_of_another():
    for row in ROWS:
        assert row.sequence, "run make models"
        assert DIFFERENT not in row.sequence, row
        assert FAILED not in row.sequence, row
    equal = [row for row in ROWS if row.sequence == SAME]
    assert len(equal) >= 80


@pytest.mark.parametrize(
    ("column", "equal", "among"), [("experts", 25, {"mixtral", "jetmoe"}), ("tensor", 65, {"llama", "llava", "doge"})]
)
def test_no_model_differs_in_silence_with_parts_of_it_on_ranks_or_ends_with_an_error_of_another(column, equal, among):
    outcomes = {row.name: getattr(row, column) for row in ROWS if getattr(row, column)}
    assert not [text for text in outcomes.values() if DIFFERENT in text or FAILED in text]
    assert sum(text == SAME for text in outcomes.values()) >= equal
    assert among <= outcomes.keys()
    assert "gpt2" not in outcomes


def test_an_outcome_says_what_came_of_the_runs_by_each_method():
    one, other = (f"fsdp fp32, sequence by {method}" for method in METHODS)
    right = {"losses": [1e-8], "norms": [1e-7], "parameters": 1e-8, "draws": False}
    same = [{"run": one, **right}, {"run": other, **right}]
    assert outcome(same) == SAME
    assert outcome([same[0], {**same[1], "losses": [1e-3]}]).startswith("ulysses: equal\nallgather: differs: 1e-03")
    assert outcome([{**each, "draws": True} for each in same]) == RANDOM
    assert outcome([{"run": one, "refused": "ModelError: not so; do that"}]) == "refused: ModelError: not so"
    assert outcome([{"run": one, "error": "TypeError: what", "ours": False}]) == "fails: TypeError: what"


def test_most_models_have_a_row_and_none_is_beyond_its_bounds_without_a_cause():
    names = [row.name for row in ROWS]
    assert names == [name for name in CASES if name in names], "run make models"
    assert len(names) > len(CASES) // 2
    for row in ROWS:
        assert row.fp32 or row.bf16 or row.errors, f"{row.name} has no figures"
        within = all(
            figure <= bound
            for precision, bounds in BOUNDS.items()
            for figure, bound in zip(getattr(row, precision), bounds.values(), strict=False)
        )
        held = within and row.export in ("", EQUAL) and not row.failures
        assert held or CASES[row.name].known, row


def test_the_page_says_what_the_data_says():
    text = (DOCS / "models-tested.md").read_text(encoding="utf-8")
    assert text == page(ROWS, environment_of(DOCS / "models-tested.md")), "run make models"
    assert f"{len(ROWS)} of {len(CASES)} models: " in text
    assert f"[{len(ROWS)} models](docs/models-tested.md)" in " ".join((DOCS.parent / "README.md").read_text().split())


def test_a_row_says_what_came_of_the_runs_of_a_model(tmp_path):
    name = next(iter(CASES))
    first, second, third, *_ = map(str, runs_of(0))
    records = [
        {"case": name, "run": first, "losses": [1e-8, 2e-8], "norms": [3e-7], "parameters": 4e-9, "export": EQUAL},
        {"case": name, "run": second, "error": "ModelError: no, not so. More of it", "ours": True},
        {"case": name, "run": third, "error": "hangs", "ours": False},
    ]
    (row,) = rows_of(records)
    assert row[:5] == (next(iter(KINDS)).title, name, (2e-8, 3e-7, 4e-9), (), EQUAL)
    assert row.errors.endswith(": ModelError: no, not so")
    assert row.failures.endswith(": hangs")
    path, (_, second, *_) = tmp_path / "rows.csv", [case.name for case in next(iter(KINDS)).cases]
    write(path, [row._replace(name=second)])
    write(path, [row])
    assert read(path) == [row, row._replace(name=second)]  # in the order of the cases
    write(path, [row._replace(cause="known")])
    assert read(path) == [row._replace(cause="known"), row._replace(name=second)]
    assert summary(read(path)) == (
        f"2 of {len(CASES)} models: 2 within the bounds. 2 of 2 exports are equal. "
        "2 models have runs that end with an error."
    )
