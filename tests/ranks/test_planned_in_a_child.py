"""Large background saves are planned in a child process of the first rank, which may fail at any moment."""

from __future__ import annotations

import logging
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import config, heard, own_share, play, prepare, refused, train, values

from dev.integrity.small_saves import content_of, snapshot, start
from unishard.checkpoint import finding, plan_cache
from unishard.checkpoint.plan_cache import PlanCache
from unishard.checkpoint.planning import Planning
from unishard.checkpoint.planning_process import PlanningProcess
from unishard.checkpoint.saving import Retention, save
from unishard.checkpoint.tensor_reader import Tensors


class Watched:
    """Saves like an engine in the background, and notes what is planned where."""

    def __init__(self, root):
        self.group, self.rank = start()
        self.root, self.cache, self.steps = Path(root), PlanCache(background=True), 0
        self.notes, self.warnings = [], []

    def save(self):
        """What comes of a save: its content, or the error."""
        self.steps += 1
        outcome = refused(
            save, self.root, snapshot(self.steps, self.steps, self.rank), Retention(), self.group, cache=self.cache
        )
        dist.barrier(self.group)
        folder = self.root / finding.name_of(self.steps)
        found = content_of(folder) == self.steps if folder.exists() else False
        left = [each.name for each in self.root.iterdir() if not each.name.startswith("step-")]
        dist.barrier(self.group)
        return outcome, found, left

    def only_first(self, act):
        """Do something on rank 0. Collective."""
        if self.rank == 0:
            act()
        dist.barrier(self.group)


def watched(root):
    """A watched run whose saves are all large, and where what is planned and warned of is noted."""
    run = Watched(root)
    patch = pytest.MonkeyPatch()
    patch.setattr(plan_cache, "MANY", 1)
    for kind in (Planning, PlanningProcess):

        def plan(self, chunk, everyone, kind=kind, before=kind.plan):
            run.notes.append((kind.__name__, "reused" if everyone[0][0] is None else "planned"))
            return before(self, chunk, everyone)

        patch.setattr(kind, "plan", plan)
    listening = heard(level=logging.WARNING)
    run.warnings = listening.__enter__()
    return run, patch, listening


def closed(run, patch, listening):
    listening.__exit__(None, None, None)
    patch.undo()
    run.cache.close()


def undisturbed(root):
    """Two saves, and the first one without the child; then the disk is full, and the child is killed between two
    saves."""
    run, patch, listening = watched(root)
    outcomes = [run.save(), run.save()]
    save(Path(f"{root} plain"), snapshot(1, 1, run.rank), Retention(), run.group)
    folders = [each / finding.name_of(1) for each in (run.root, Path(f"{root} plain"))]
    same = (folders[0] / ".metadata").read_bytes() == (folders[1] / ".metadata").read_bytes()
    process = run.cache._process
    run.notes.append("full")
    run.only_first(lambda: _limit(process, 100))
    outcomes.append(run.save())
    run.only_first(lambda: _limit(process, resource.RLIM_INFINITY))
    outcomes += [run.save(), run.save()]
    run.notes.append("killed")
    run.only_first(lambda: (os.kill(process.pid, signal.SIGKILL), process._process.wait()))
    outcomes += [run.save(), run.save()]
    closed(run, patch, listening)
    return same, outcomes, run.notes, run.warnings


def _limit(process, size):
    """Limit the files of a process: as a full disk, but no other process is harmed."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def killed(root):
    """The child is killed while the ranks write their shards, after one save."""
    run, patch, listening = watched(root)
    outcomes = [run.save()]
    finish = PlanningProcess.finish

    def kill(self, *arguments, **named):
        os.kill(self.pid, signal.SIGKILL)
        return finish(self, *arguments, **named)

    patch.setattr(PlanningProcess, "finish", kill)
    outcomes += [run.save(), run.save(), run.save()]
    closed(run, patch, listening)
    return outcomes, run.notes, run.warnings


def with_an_engine(root):
    """Processes that plan, of an engine that saves in turn and of one that does so in the background, and after its
    end; the weights."""
    start()
    patch, found = pytest.MonkeyPatch(), []
    patch.setattr(plan_cache, "MANY", 1)
    for background in (False, True):
        with prepare(config("fsdp", checkpoint={"async_save": background})) as engine:
            train(engine, own_share(1))
            folder = engine.save(Path(root) / str(background))
            engine.wait()
            process = engine._checkpoints._plans._process
            stored = Tensors(folder)
            equal = all(
                torch.equal(stored.full(f"model.{name}"), engine.weights.read(name).cpu())
                for name, _ in engine.module.named_parameters()
            )
            found.append((process is not None, equal))
        found.append(process is None or process._process.poll() is not None)
    patch.undo()
    return found


def scenarios(folder):
    return tuple((act, (f"{folder}/{act.__name__}",)) for act in (undisturbed, killed, with_an_engine))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    found = play(scenarios(tmp_path_factory.mktemp("planned")))
    return {act: values(outcomes) for (act, _), outcomes in found.items()}


SAVED = ("nothing", True, ["latest"])
"""Of a save: what it raised, whether the checkpoint holds what was saved, and what is there beside checkpoints."""


def test_a_save_with_the_child_is_the_same_and_keeps_its_plan(played):
    (same, outcomes, notes, _), (_, others, *_) = played[undisturbed]
    assert same
    assert outcomes[:2] == others[:2] == [SAVED, SAVED]
    assert notes[:2] == [("PlanningProcess", "planned"), ("PlanningProcess", "reused")]


def test_a_full_disk_ends_the_save_on_all_ranks_and_not_the_child(played):
    (_, outcomes, notes, _), (_, others, *_) = played[undisturbed]
    assert outcomes[2] == others[2]
    assert "CheckpointError" in outcomes[2][0]
    assert "rank 0 could not write its shards: [Errno 27] File too large" in outcomes[2][0]
    assert outcomes[2][1:] == (False, ["latest"])
    assert outcomes[3:5] == others[3:5] == [SAVED, SAVED]
    full = notes.index("full")
    assert notes[full + 1 : full + 4] == [("PlanningProcess", how) for how in ("reused", "planned", "reused")]


def test_where_the_child_has_ended_the_rank_plans_itself_and_says_so_once(played):
    (_, outcomes, notes, warnings), (_, others, _, silent) = played[undisturbed]
    assert outcomes[5:] == others[5:] == [SAVED, SAVED]
    assert notes[notes.index("killed") + 1 :] == [("Planning", "planned"), ("Planning", "reused")]
    assert silent == []
    (warning,) = warnings
    assert warning.startswith("the process that plans saves has ended (SIGKILL); ")


def test_a_child_that_ends_during_a_save_ends_it_on_all_ranks_and_nothing_more(played):
    (outcomes, notes, warnings), (others, *_) = played[killed]
    assert outcomes == others
    assert outcomes[1][0].endswith(
        "rank 0 could not write its shards: the process that plans saves has ended (SIGKILL)"
    )
    assert outcomes[1][1:] == (False, ["latest"])
    assert [outcomes[0], *outcomes[2:]] == [SAVED] * 3
    assert notes[2:] == [("Planning", "planned"), ("Planning", "reused")]
    assert len(warnings) == 1


def test_an_engine_has_a_child_from_its_first_background_save_to_its_end(played):
    assert played[with_an_engine] == [[(False, True), True, (first, True), True] for first in (True, False)]
