"""Which run the checkpoints of an engine belong to, so that no run deletes or replaces those of another one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, NamedTuple
from uuid import uuid4

from unishard.checkpoint import finding
from unishard.checkpoint.headers import UNKNOWN_RUN, header_of
from unishard.errors import CheckpointError

_logger = logging.getLogger("unishard")


class RunName(NamedTuple):
    """A run among those that save in one directory."""

    run: str
    """8 hexadecimal digits, made at the first save in this directory; a resume from there carries it on."""
    other_run_present: bool
    """Whether the run began beside checkpoints of another one: then the names of its checkpoints end with it."""


class Lineage:
    """The run of one engine, in each directory. A run that is loaded from another directory is a new one.

    Used by rank 0 only.
    """

    def __init__(self, root: Path | None, on_existing: Literal["error", "resume", "new"]) -> None:
        """Begin a run.

        Args:
            root: `checkpoint.dir`.
            on_existing: `checkpoint.on_existing`.
        """
        self._root = root
        self.places: dict[str, Path] = {} if root is None else {str(root): root}
        """Where the run saves: `checkpoint.dir`, and by the URL of its copies a directory with their manifests."""
        self._refuses = on_existing != "new"
        self._saved: dict[Path, RunName] = {}
        self._resumed: tuple[Path, RunName] | None = None
        self._from: Path | None = None
        self._admitted = False
        self._new = uuid4().hex[:8]

    def run_in(self, root: Path, resumes: Path | None = None) -> str:
        """The id of this run in a directory, before its first save there too.

        Args:
            root: The directory.
            resumes: A checkpoint whose run is about to be continued.
        """
        name, header = self._known(root), None if resumes is None else header_of(resumes)
        return header.run if header is not None else self._new if name is None else name.run

    def resumed(self, checkpoint: Path, shown: Path) -> None:
        """Continue the run of a checkpoint, in its directory.

        Args:
            checkpoint: Where it is.
            shown: What a user knows it as.
        """
        header, name = header_of(checkpoint), finding.STEP.fullmatch(checkpoint.name)
        run = header.run if header else UNKNOWN_RUN
        self._from, self._admitted = shown, False
        self._resumed = (
            checkpoint.parent.resolve(),
            RunName(run, other_run_present=name is not None and name["run"] == run),
        )

    def admit(self) -> None:
        """Check that `checkpoint.dir` holds no checkpoints of other runs only.

        Raises:
            CheckpointError: It does, and the config does not allow a new run beside them; or it cannot be read.
        """
        root = self._root
        if self._admitted or root is None or self._known(root) or not self._refuses:
            return
        for shown, place in self.places.items():
            newest = finding.latest(place)
            if newest is not None:
                step = next(found.step for found in finding.checkpoints(place) if found.path == newest)
                raise CheckpointError(
                    f"{shown}: holds checkpoints of another run, the newest of step {step}, and this run "
                    f"{self._instead()}"
                )
        self._admitted = True

    def _instead(self) -> str:
        """What this run is, and what to write."""
        beside = "`new` to keep it and begin another one beside it, or set another checkpoint.dir"
        load = 'call engine.load("latest") before the first update'
        if self._from is not None:
            return (
                f"was loaded from {self._from}; set checkpoint.on_existing to {beside}; or, to continue the other "
                f"run, {load}"
            )
        return (
            "was not resumed from one of them; set checkpoint.on_existing to `resume` to continue that run or to "
            f"{beside}; or {load}"
        )

    def name(self, root: Path, step: int) -> RunName:
        """The run under which a step is saved.

        Raises:
            CheckpointError: As in `admit`, if `root` is `checkpoint.dir`.
        """
        name = self._known(root)
        if name is None:
            if self._root is not None and root.resolve() == self._root.resolve():
                self.admit()
            others = finding.checkpoints(root)
            name = RunName(self._new, other_run_present=bool(others))
            if others:
                _logger.warning(
                    "%s holds checkpoints of another run, which are kept; the names of this run's checkpoints end with "
                    "its id, as in %s",
                    root,
                    finding.name_of(step, name.run),
                )
        self._saved[root.resolve()] = name
        there = header_of(root / finding.name_of(step))
        taken = there is not None and there.run != name.run
        return name._replace(other_run_present=name.other_run_present or taken)

    def _known(self, root: Path) -> RunName | None:
        """The run's name there, if it has saved there or was resumed from there; also once that has been moved, and a
        link put in its place.
        """
        place = root.resolve()
        known = self._saved | ({} if self._resumed is None else dict([self._resumed]))
        if place in known:
            return known[place]
        moved = [name for former, name in known.items() if former.resolve() == place]
        newest = finding.latest(root) if moved else None
        header = None if newest is None else header_of(newest)
        return next((name for name in moved if header is not None and header.run == name.run), None)
