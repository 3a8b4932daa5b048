"""What may be found of tiny checkpoints after a save that was cut off."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from dev.integrity.small_saves import FORMER, FOUND_BEFORE, NEW, NEXT, NEXT_STEP, RETENTION, Scenario, content_of
from unishard.checkpoint import finding, manifest
from unishard.distributed.on_ranks import on_first


def found_wrong(root: Path, scenario: Scenario, promised: bool) -> tuple[str, dict[str, int]]:
    """What is wrong with the checkpoints after a save that was cut off, and their contents by name, in the order of
    their writing.

    Args:
        root: Where they are.
        scenario: What was saved.
        promised: Whether a rank was told that the new one is complete.
    """
    try:
        found = {each.name: content_of(each.path) for each in sorted(finding.checkpoints(root), key=finding.age_of)}
        latest = finding.latest(root)
        newest = None if latest is None else (manifest.read(latest).step, content_of(latest))
    except Exception as error:  # whatever it is, nobody can go on from there
        return f"{type(error).__name__}: {error}", {}
    said = f"found {found}, of which {newest} is the latest"
    if found.get(scenario.saved_as) != NEW:
        if promised:
            return "a rank was told that the new checkpoint is complete, and it is not there", found
        return "" if (found, newest) == (FOUND_BEFORE, (30, FORMER[30])) else said, found
    after = {name: version for name, version in FOUND_BEFORE.items() if name != scenario.saved_as} | {
        scenario.saved_as: NEW
    }
    complete = kept(after).items() <= found.items() <= after.items()
    return "" if complete and newest == (scenario.step, NEW) else said, found


class Left(NamedTuple):
    """What a save that was cut off left."""

    wrong: str
    """With it; empty if nothing."""
    new: bool
    """Whether the new checkpoint is there."""


def left_in(
    root: Path, scenario: Scenario, promised: bool, again: Callable[[Path], None], group: dist.ProcessGroup
) -> Left:
    """What is left in a directory: as it is found, and whether one more save is as it should be. Collective."""
    wrong, before = on_first(group, lambda: found_wrong(root, scenario, promised))
    new = before.get(scenario.saved_as) == NEW
    if wrong:
        return Left(wrong, new)
    try:
        again(root)
    except Exception as error:  # whatever it is, the run cannot go on
        return Left(f"the next save: {type(error).__name__}: {error}", new)
    expected = kept(before | {finding.name_of(NEXT_STEP): NEXT})
    return Left(on_first(group, lambda: _left_wrong(root, expected)), new)


def _left_wrong(root: Path, expected: Mapping[str, int]) -> str:
    """What is wrong with a directory after the next save; these contents should be there by name, and nothing else."""
    found = {each.name: content_of(each.path) for each in finding.checkpoints(root)}
    names = sorted(os.listdir(root))
    wanted = sorted(["latest", *expected])
    newest = finding.latest(root)
    if (found, names) != (dict(sorted(expected.items())), wanted) or newest != root / finding.name_of(NEXT_STEP):
        return f"after the next save there are {names} with contents {found} instead of {wanted} with {expected}"
    return ""


def kept(saved: Mapping[str, int]) -> dict[str, int]:
    """What retention leaves of checkpoints in the order in which they were saved: all of runs other than that of the
    last one."""
    last, every = RETENTION.keep_last, RETENTION.keep_every
    assert last is not None
    assert every is not None
    parsed = {name: match for name in saved if (match := finding.STEP.fullmatch(name))}
    run = parsed[list(saved)[-1]]["run"]
    own = [name for name in saved if parsed[name]["run"] == run]
    return {
        name: saved[name]
        for name in saved
        if name not in own or name in own[-last:] or int(parsed[name]["step"]) % every == 0
    }
