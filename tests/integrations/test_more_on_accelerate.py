"""Several models, four ranks and fp16 under unishard's Accelerator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.testing import assert_close

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from harness import DEEP, in_turn, play, values

from unishard.testing import run_ranks
from unishard.testing.cells import BACKENDS

pytest.importorskip("accelerate", reason="pip install 'unishard[accelerate]'")

import accelerate_programs as programs

PLAIN = ("plain", "")
CELLS = (
    *((backend, "full_shard") for backend in BACKENDS),
    *((("fsdp", "no_shard"), ("deepspeed", "shard_grad_op")) if DEEP else ()),
)
CLOSE = {"rtol": 1e-6, "atol": 1e-7}
SCENARIOS = (
    *((programs.against_each_other, cell) for cell in (PLAIN, *CELLS)),
    *((programs.refused_for_several, (backend,)) for backend in BACKENDS),
    *((programs.in_precision, (backend, name)) for backend in BACKENDS for name in ("fp16", "static")),
    (programs.in_precision, ("fsdp", "fp32")),
)


def of(scenario, *arguments):
    return values(play(SCENARIOS)[scenario, arguments])


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_two_models_train_against_each_other_as_with_ddp(cell):
    for found, expected in zip(
        of(programs.against_each_other, *cell), of(programs.against_each_other, *PLAIN), strict=True
    ):
        assert len(found) == 7 * 2 + 4 * 2
        assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_trains_two_models_is_one_error(backend):
    for both, frozen, none in of(programs.refused_for_several, backend):
        assert "the loss reaches the parameters of 2 prepared models, Layers and Layers" in both
        assert "inside `with accelerator.engine_of(other).weights.frozen():`" in both
        assert "all parameters of Sequential were frozen after prepare" in frozen
        assert "0 prepared models could be meant, not one; prepare a model with its optimizer" in none


@pytest.mark.ranks
@in_turn
def test_four_ranks_train_as_with_ddp(backend):
    expected = run_ranks(4, programs.accumulated, *PLAIN)[0]
    assert_close(run_ranks(4, programs.accumulated, backend, "full_shard")[0], expected, rtol=1e-6, atol=1e-6)


def test_fp16_skips_the_same_updates_on_both_engines_and_the_schedule_waits():
    """Accelerate itself computes in fp32 on a CPU, whatever `mixed_precision` says."""
    (losses, skipped, rate), (other, skipped_too, rate_too) = (
        of(programs.in_precision, backend, "fp16")[0] for backend in BACKENDS
    )
    assert skipped == skipped_too
    assert True in skipped
    assert False in skipped
    assert_close(other, losses, rtol=1e-3, atol=1e-3)
    assert rate == rate_too == pytest.approx(1e-2 / (1 + 2 * skipped.count(False)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_trains_near_fp32(backend):
    found, skipped, _ = of(programs.in_precision, backend, "static")[0]
    expected, _, _ = of(programs.in_precision, "fsdp", "fp32")[0]
    assert not any(skipped)
    assert found != expected
    assert_close(found, expected, rtol=1e-2, atol=1e-3)
