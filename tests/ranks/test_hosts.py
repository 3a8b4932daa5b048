"""Several hosts for real: `unishard launch` on two network namespaces, each with an address of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import hosts
import launched_on_hosts
import launched_training
import pytest
from forking import in_a_fork
from harness import until

from unishard.testing import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(bool(hosts.unavailable()), reason=hosts.unavailable())]

CONFIG = {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "sharding": "full_shard"}


class Played(NamedTuple):
    strategies: dict[str, list[float]]
    """Losses by engine and strategy, of 4 ranks on two hosts."""
    lines: list[tuple[int, int, float]]
    """World size, step and loss of the training that lost a host after step 5."""
    ended: int
    said: str


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    """One start of both hosts; the other one is lost."""
    found: Played = in_a_fork(play, tmp_path_factory.mktemp("hosts"), timeout=420)
    return found


def play(folder: Path) -> Played:
    config, strategies, losses = (folder / name for name in ("c.yaml", "strategies", "losses"))
    saves = {"dir": str(folder / "runs"), "every_steps": 2, "on_existing": "resume"}
    waits = {"last_call_timeout": 3, "keep_alive_interval": 1}
    launch = {
        "nodes": "1:2",
        "processes_per_node": 2,
        "endpoint": "left:29500",
        "max_restarts": 2,
        "rendezvous_options": waits,
    }
    config.write_text(json.dumps(CONFIG | {"backend": "deepspeed", "checkpoint": saves, "launch": launch}))
    words = [
        "-m",
        "unishard",
        "launch",
        str(config),
        launched_on_hosts.__file__,
        json.dumps(CONFIG),
        str(strategies),
        str(losses),
    ]

    def lines() -> list[tuple[int, int, float]]:
        said = losses.read_text().splitlines() if losses.exists() else []
        return [(world, step, loss) for _, world, step, loss in map(json.loads, said)]

    with hosts.two_hosts(folder) as (left, right):
        process, lost = (host.start(words, folder / host.name) for host in (left, right))
        try:
            assert until(lambda: process.poll() is not None or (4, 5) in [line[:2] for line in lines()], 180)
            right.lose()
            ended = process.wait(180)
        finally:
            left.stop()
            right.stop()
            process.wait()
            lost.wait()
    said = (folder / "left").read_text()
    assert strategies.exists(), said
    return Played(json.loads(strategies.read_text()), lines(), ended, said)


def test_every_strategy_trains_across_two_hosts_as_on_one(played):
    one_host = run_ranks(4, launched_on_hosts.losses_of_strategies, CONFIG)[0]
    assert len(one_host) == len(launched_on_hosts.CELLS)
    assert played.strategies == {cell: pytest.approx(losses, rel=1e-6) for cell, losses in one_host.items()}


def test_a_run_goes_on_with_the_host_that_is_left(played):
    assert played.ended == 0, played.said
    after = [
        step
        for world, step, _ in played.lines[played.lines.index(max(line for line in played.lines if line[0] == 4)) :]
        if world == 2
    ]
    assert after[-1] == 8, played.said
    assert after == list(range(after[0], 9)), played.said
    expected = run_ranks(2, launched_training.whole_run, CONFIG, "backend=deepspeed")[0]
    for _, step, loss in played.lines:
        assert loss == pytest.approx(expected[step], rel=1e-5)
