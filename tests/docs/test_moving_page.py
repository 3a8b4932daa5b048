"""docs/moving.md: a run that moves from DeepSpeed to FSDP and back trains as one that stays, and the page says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dev import moving
from dev.moving import STAGES, Move, Stage, measure

PAGE = Path(__file__).parents[2] / "docs/moving.md"
TINY = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def rows(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.endswith(" MiB |")]


@pytest.fixture(scope="module")
def moved():
    return measure("fp32", TINY, 3)


def test_a_run_that_moves_twice_trains_as_one_that_stays(moved):
    assert max(*moved.losses, *moved.norms) < 1e-6
    assert [stage.load > 0 for stage in moved.stages] == [False, True, True]
    assert all(stage.saved > moved.parameters * 12 for stage in moved.stages)


def test_the_page_is_made_of_the_figures():
    stages = [Stage([1.0], [1.0], number / 10, 0.5, 3 << 20) for number in range(len(STAGES))]
    made = rows(moving.page({"fp32": Move(10, stages, [0.0, 1e-7, 2e-7], [0.0, 3e-7, 4e-7])}))
    assert made[2] == ["fp32", "deepspeed shard_grad_op", "2e-07", "4e-07", "0.20 s", "0.50 s", "3 MiB"]


def test_its_losses_are_within_the_bounds():
    figures = rows(PAGE.read_text(encoding="utf-8"))
    assert [row[:2] for row in figures] == [
        [precision, " ".join(on)] for precision in ("fp32", "bf16") for on in STAGES
    ]
    for precision, _, losses, norms, *_ in figures:
        loss_bound, norm_bound = {"fp32": (1e-6, 1e-5), "bf16": (1e-3, 2e-2)}[precision]
        assert float(losses) <= loss_bound
        assert float(norms) <= norm_bound


def test_it_names_the_threads_of_what_goes_wrong_elsewhere():
    threads = re.findall(r"\[(\S+) (\d+)\]\(https://github.com/\S+/(?:issues|pull)/(\d+)\)", PAGE.read_text("utf-8"))
    assert len(threads) > 10
    assert all(number == linked for _, number, linked in threads)
