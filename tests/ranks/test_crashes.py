"""Ranks that are killed while they save, disks that run full and damaged files lose no more than the save that was cut
off."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import on_ranks, refused
from harness.training import ADAMW, config, curve, everyones, losses_of, my_rank, own_share, prepare, train

from dev.integrity.crashing import GRACE, MEMORY, Harness, spanning
from dev.integrity.damaging import damage_files
from dev.integrity.left import found_wrong
from dev.integrity.small_saves import FOUND_BEFORE, NEW, RETENTION, SCENARIOS, WORLD, snapshot, start
from dev.ranks.interception import Event, Interception, flip, killing
from unishard.checkpoint import finding
from unishard.checkpoint.saving import save
from unishard.testing import RankFailure, run_ranks


@pytest.fixture(scope="module")
def harness():
    with tempfile.TemporaryDirectory(prefix="crashes-", dir=MEMORY) as folder:
        yield Harness(Path(folder))


# -- ranks that are killed -------------------------------------------------------------------------


def test_there_are_points_in_every_part_of_a_save(harness):
    points = harness.points()
    assert len(points) >= 200
    kinds = {point.kind for point in points}
    writing = ("open", "write", "half written", "fsync")
    assert {
        f"{kind}, {where}" for kind, where in product(writing, ("tensors", "index", "assets", "manifest", "latest"))
    } <= kinds
    assert {"rename, index", "rename, manifest", "rename, replacing", "rename, name", "rename, latest"} <= kinds
    assert {"rename, deleting", "unlink, deleting", "rmdir, deleting", "the end"} <= kinds
    for scenario, victims in product(SCENARIOS, ((0,), (1,), (1, 0), (0, 1))):
        assert any((point.scenario, point.victims) == (scenario, victims) for point in points)


def test_a_kill_at_any_moment_loses_the_save_that_was_cut_off_at_most(harness):
    """At some moments in every part of it; `make crash` plays all."""
    points = spanning(harness.points(), 24)
    assert {point.where for point in points} == {point.where for point in harness.points()}
    played = harness.play(points)
    lost = [each for each in played if each.problem]
    assert not lost, "\n".join(f"{each.point}: {each.problem}" for each in lost)
    assert {each.new for each in played} == {False, True}, "some end before the new checkpoint is there, some after"
    assert harness.slowest < GRACE


@pytest.mark.parametrize("harm", ["mixed", "gone", "flipped"])
def test_the_harness_sees_what_must_not_be(harm, harness, tmp_path):
    root, scenario = Path(shutil.copytree(harness.templates[SCENARIOS[0]], tmp_path / "root")), SCENARIOS[0]
    assert found_wrong(root, scenario, promised=False) == ("", FOUND_BEFORE)
    assert "told that the new checkpoint is complete" in found_wrong(root, scenario, promised=True)[0]
    newest = root / "step-00000030"
    if harm == "mixed":
        shutil.copytree(
            root / "step-00000020", newest, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__1_0.distcp")
        )
    elif harm == "gone":
        shutil.rmtree(newest)
    else:
        flip(newest / "__1_0.distcp", 0.5, 3)
    assert found_wrong(root, scenario, promised=False)[0]


# -- disks that run full ---------------------------------------------------------------------------


def test_a_disk_that_runs_full_at_any_moment_is_told_and_keeps_what_was_there(harness, deep):
    outcomes = harness.fill(stride=2 if deep else 4)
    assert len(outcomes) > 50
    assert {outcome.event.where for outcome in outcomes} >= {"tensors", "index", "assets", "manifest", "latest"}
    for outcome in outcomes:
        assert not outcome.fault, outcome


def fails_on_the_first_rank(root):
    """The index cannot be given its name, which only rank 0 does."""
    group, rank = start()
    rename = Path.rename

    def broken(path, target):
        if Path(target).name == ".metadata":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    Path.rename = broken
    told = refused(save, Path(root), snapshot(40, NEW, rank), RETENTION, group)
    dist.barrier(group)
    assert "Input/output error" in told
    assert finding.incomplete(Path(root)) == []


def test_a_disk_that_fails_on_the_first_rank_alone_is_told_by_all(harness, tmp_path):
    root = shutil.copytree(harness.templates[SCENARIOS[0]], tmp_path / "root")
    on_ranks(fails_on_the_first_rank, str(root))
    assert found_wrong(root, SCENARIOS[0], promised=False) == ("", FOUND_BEFORE)


# -- with an engine --------------------------------------------------------------------------------

KILLS = {
    "while rank 1 writes its tensors": ((1,), Event("half written", "tensors")),
    "before rank 0 points to the new one": ((1, 0), Event("rename", "latest")),
}
SAVES, UPDATES = (2, 4), 7


def trained(root, victims, event):
    """Saves twice on the way; the second time, ranks are killed at the first such event in the last of them."""
    with prepare(config("fsdp", "full_shard", optimizer=ADAMW)) as engine:
        losses = losses_of(engine, own_share(UPDATES)[: SAVES[0]])
        engine.save(root)
        losses += losses_of(engine, own_share(UPDATES)[SAVES[0] : SAVES[1]])
        kill = killing(victims)
        if victims and my_rank() == victims[-1]:
            Interception(lambda seen: kill() if seen == event else None)
        engine.save(root)
        return losses + losses_of(engine, own_share(UPDATES)[SAVES[1] :])


def resumed(roots):
    """Goes on from what is found in each directory, on one rank; saves there again at once."""
    answers = []
    for root in roots:
        cfg = config("deepspeed", "shard_grad_op", optimizer=ADAMW, training={"gradient_accumulation_steps": 2})
        with prepare(cfg) as engine:
            begun = engine.load(root)
            engine.save(root)
            left = finding.incomplete(Path(root))
            losses = curve(train(engine, everyones(begun.step, UPDATES, world=2))).losses
            answers.append((begun, left, losses))
    return answers


@cache
def gone_on(folder):
    """Losses of a run that nobody disturbed, and what came of each that was killed."""
    undisturbed = run_ranks(2, trained, f"{folder}/undisturbed", (), None)[0]
    roots = []
    for index, (victims, event) in enumerate(KILLS.values()):
        roots.append(f"{folder}/{index}")
        with pytest.raises(RankFailure) as failure:
            run_ranks(2, trained, roots[-1], victims, event, grace=GRACE)
        ends = {rank: error.type for rank, error in failure.value.errors.items()}
        assert all((ends.get(rank) == "Died") is (rank in victims) for rank in range(2)), failure.value
        assert "Hung" not in ends.values()
    return undisturbed, dict(zip(KILLS, run_ranks(1, resumed, roots)[0], strict=True))


@pytest.mark.parametrize(("kill", "begins"), [*zip(KILLS, SAVES, strict=True)])
def test_another_engine_on_another_number_of_ranks_goes_on_where_a_killed_run_had_saved(kill, begins, tmp_path_factory):
    undisturbed, answers = gone_on(tmp_path_factory.getbasetemp() / "killed")
    begun, left, losses = answers[kill]
    assert begun.step == begins
    seeded = "saved by 2 ranks, so random generators (dropout and others) are seeded from training.seed"
    assert any(seeded in note for note in begun.notes)
    assert left == []
    assert losses == pytest.approx(undisturbed[begun.step :], rel=1e-6)


# -- damaged files ----------------------------------------------------------------------------------


def test_every_file_that_is_truncated_or_has_a_flipped_bit_is_named_and_refused(tmp_path):
    """By `unishard checkpoint verify`, and by `load`, which loads it when it is whole again."""
    for outcomes in run_ranks(WORLD, damage_files, str(tmp_path), "fsdp"):
        assert {each.file for each in outcomes} >= {".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"}
        assert {each.harm for each in outcomes} == {"flip", "truncate"}
        assert [each for each in outcomes if not each.found] == []
