"""Lets a disk run full at every moment of a save: nothing more can be written from there on, while renaming and
deleting still work."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from dev.integrity.left import left_in
from dev.integrity.small_saves import NEW, NEXT, NEXT_STEP, RETENTION, WORLD, Scenario, snapshot, start
from dev.ranks.interception import Event, Interception
from dev.ranks.judging import refused
from unishard.checkpoint.saving import save
from unishard.distributed import process_group
from unishard.distributed.on_ranks import on_first

__all__ = ["Outcome", "fill"]

_NEEDS_ROOM = {"open", "write", "half written", "fsync", "mkdir"}


class Outcome(NamedTuple):
    """What came of one save on a disk that was full."""

    scenario: str
    rank: int
    """Whose disk it was."""
    event: Event
    """Before which it was full."""
    told: str
    """What this rank's `save` raised."""
    wrong: str
    """With what a run that goes on from there would find, and with the next save of this one; empty if nothing."""

    @property
    def fault(self) -> str:
        """What is not as it should be; empty if nothing."""
        full = os.strerror(errno.ENOSPC)
        return self.wrong or ("" if full in self.told else f"{full!r} is not in {self.told!r}")


def fill(templates: Mapping[Scenario, str], stride: int) -> list[Outcome]:
    """Save with the disk of one rank running full, at every so many moments, and again when there is room.
    Collective."""
    group, _ = start()
    interception, outcomes = Interception(), []
    for (scenario, template), victim in product(templates.items(), range(WORLD)):
        for at in count(0, stride):
            outcome = _fill(interception, Path(template), scenario, victim, at, group)
            if outcome is None:  # it had ended before
                break
            outcomes.append(outcome)
    return outcomes


def _fill(
    interception: Interception, template: Path, scenario: Scenario, victim: int, at: int, group: dist.ProcessGroup
) -> Outcome | None:
    def again(root: Path) -> None:
        save(root, snapshot(NEXT_STEP, NEXT, dist.get_rank()), RETENTION, group)

    root = template.with_name(f"{template.name}, rank {victim} full at {at}")
    on_first(group, lambda: shutil.copytree(template, root))
    event, told = _save_with(interception, at if dist.get_rank() == victim else None, root, scenario)
    everyone: list[Event | None] = [None] * WORLD
    dist.all_gather_object(everyone, event, group=group)
    event = everyone[victim]
    outcome = (
        None
        if event is None
        else Outcome(scenario.name, victim, event, told, left_in(root, scenario, False, again, group).wrong)
    )
    on_first(group, lambda: shutil.rmtree(root))
    return outcome


def _save_with(interception: Interception, at: int | None, root: Path, scenario: Scenario) -> tuple[Event | None, str]:
    """The event before which this rank's disk was full, if it was, and what `save` raised."""
    passed, first = 0, None

    def act(event: Event) -> None:
        nonlocal passed, first
        if at is None or event.kind not in _NEEDS_ROOM:
            return
        if passed >= at:
            first = first or event
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        passed += 1

    interception.act = act
    taken = snapshot(scenario.step, NEW, dist.get_rank(), scenario.beside)
    told = refused(save, root, taken, RETENTION, process_group.host_group())
    interception.act = lambda event: None
    return first, told
