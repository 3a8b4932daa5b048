"""The guide's pages "From ...": the other tool's loop and ours have the same losses, on each engine."""

from __future__ import annotations

import os

import pytest
from fences import LOOPS, blocks

from unishard.config.topology import Topology
from unishard.failures.lifetime import ensure
from unishard.testing import run_ranks
from unishard.testing.cells import BACKENDS
from unishard_deepspeed.start import load

pytestmark = pytest.mark.ranks

RANKS = {"docs/from-lightning.md": 1}
"""Lightning divides an update's samples among the ranks in another way."""


def losses_of(source, folder):
    os.chdir(folder)
    if "import deepspeed" in source:
        load(ensure(Topology.from_environment()))  # DeepSpeed alone would first compile for half a minute
    names = {"__name__": "__main__"}
    exec(compile(source, "page", "exec"), names)
    return names["losses"]


@pytest.mark.parametrize("page", LOOPS)
def test_both_loops_have_the_same_losses(page, tmp_path):
    start, theirs, ours = (block.text for block in blocks("python") if block.page == page)
    assert ours.count('"fsdp"') == 1
    loops = [theirs, *(ours.replace('"fsdp"', f'"{backend}"') for backend in BACKENDS)]
    expected, *got = (run_ranks(RANKS.get(page, 2), losses_of, f"{start}\n{loop}", str(tmp_path))[0] for loop in loops)
    assert len(expected) > 3
    for losses in got:
        assert losses == pytest.approx(expected, rel=1e-5)
