"""A save in which ranks are killed at a point, and what a resumed run would find: in the ranks of `crashing.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from dev.integrity.left import Left, left_in
from dev.integrity.small_saves import NEW, NEXT, NEXT_STEP, Scenario, save_as_an_engine, start
from dev.ranks.interception import Event, Interception, killing


class Point(NamedTuple):
    """Where a save is cut off."""

    scenario: Scenario
    victims: tuple[int, ...]
    """Ranks that are killed, the one that counts its events last."""
    at: int
    event: Event | None
    """Of that number; None for the end of the save."""

    @property
    def where(self) -> str:
        """Which part of a checkpoint, or which collective."""
        return "the end" if self.event is None else self.event.where

    @property
    def kind(self) -> str:
        """What is done to it there."""
        return self.where if self.event is None else f"{self.event.kind}, {self.where}"


def count(roots: Mapping[Scenario, str]) -> list[list[Event]]:
    """Events of this rank in an undisturbed save of each scenario. Collective."""
    group, _ = start()
    interception, counted = Interception(), []
    for scenario, root in roots.items():
        events: list[Event] = []
        interception.act = events.append
        save_as_an_engine(Path(root), scenario, NEW, group)
        interception.act = lambda event: None
        counted.append(events)
    return counted


def cut_off(root: str, point: Point) -> None:
    """A save in which ranks are killed; those that it ended for leave a note and wait for the others. Collective."""
    group, rank = start()
    kill, events = killing(point.victims), []

    def act(event: Event) -> None:
        events.append(event)
        if len(events) > point.at:
            kill()

    counts = rank == point.victims[-1]
    interception = Interception(act) if counts else None
    save_as_an_engine(Path(root), point.scenario, NEW, group)
    if interception is not None:
        interception.act = lambda event: None
    note_of(root, rank).touch()
    if counts:
        kill()
    dist.barrier(group)


def note_of(root: str, rank: int) -> Path:
    """There when a rank was told that its save is complete."""
    return Path(f"{root} told to {rank}")


def examine(roots: Sequence[tuple[str, Scenario, bool]]) -> list[Left]:
    """What is left in each directory. Collective."""
    group, _ = start()

    def again(root: Path) -> None:
        save_as_an_engine(root, Scenario("once more", NEXT_STEP), NEXT, group)

    return [left_in(Path(root), scenario, promised, again, group) for root, scenario, promised in roots]
