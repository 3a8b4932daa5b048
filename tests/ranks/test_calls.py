"""How many Python functions of unishard one update calls: the same number on every machine, as no time is."""

from __future__ import annotations

import pytest
from harness import DEEP, play, values

from benchmarks.calls import BLOCKS, count
from unishard.failures import collective_check

MARGIN = 1.05


def counted(*cell):
    """Of steps that take no time: in long ones, as where the other rank is late, the desync check looks at each
    call."""
    samples_all = collective_check.samples_all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_check, "samples_all", lambda updates, seconds: samples_all(updates, 0.0))
        return count(*cell)


def both_ranks(backend, strategy, blocks):
    return values(play(tuple((counted, cell) for cell in CELLS))[counted, (backend, strategy, blocks)])


def of(backend, strategy):
    """Own calls of the smaller and of the larger model, the same on both ranks."""
    found = []
    for blocks in BLOCKS:
        first, second = both_ranks(backend, strategy, blocks)
        assert first.own == second.own
        found.append(first.own)
    return found


PLAIN = {
    ("fsdp", "no_shard"): 187,
    ("fsdp", "shard_grad_op"): 303,
    ("fsdp", "full_shard"): 298,
    ("deepspeed", "no_shard"): 211,
    ("deepspeed", "shard_grad_op"): 200,
    ("deepspeed", "full_shard"): 283,
}
"""Own calls of one update of the smaller model."""
ENGINES = [engine for engine in PLAIN if DEEP or engine not in (("fsdp", "shard_grad_op"), ("deepspeed", "no_shard"))]
CELLS = tuple((*engine, blocks) for engine in ENGINES for blocks in BLOCKS)
A_BLOCK = 24
"""Own calls that another unit adds, under a strategy that gathers it: which module the forward enters is compared
between the ranks, FSDP2's hooks have others before and after them, and DeepSpeed asks parameters that are shown to the
script for their class."""


@pytest.mark.parametrize("engine", ENGINES, ids="-".join)
def test_an_update_calls_few_functions(engine):
    own = of(*engine)[0]
    assert own.total() <= MARGIN * PLAIN[engine], own.most_common(20)


@pytest.mark.parametrize("engine", ENGINES, ids="-".join)
def test_nothing_walks_the_parameters(engine):
    small, large = of(*engine)
    more = {name: number - small[name] for name, number in large.items() if number > small[name]}
    assert sum(more.values()) <= A_BLOCK * (BLOCKS[1] - BLOCKS[0]), more


@pytest.mark.parametrize("engine", ENGINES, ids="-".join)
def test_an_update_starts_no_process(engine):
    for calls in both_ranks(*engine, BLOCKS[0]):
        assert not [name for name in calls.others if name.startswith("subprocess.py:") or "/subprocess.py:" in name]
