"""Save and load checkpoints, on any engine, strategy and number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist

from unishard.checkpoint import directory, finding, ownership
from unishard.checkpoint.background import Background
from unishard.checkpoint.export.online import export
from unishard.checkpoint.files import path_of
from unishard.checkpoint.headers import header_of
from unishard.checkpoint.plan_cache import PlanCache
from unishard.checkpoint.remote.download import Download
from unishard.checkpoint.remote.run_copies import RunCopies
from unishard.checkpoint.saving import Retention, Snapshot, save, without_collections
from unishard.config.paths import url_of
from unishard.contract.results import Resumed
from unishard.distributed import agreement, process_group
from unishard.distributed.interrupts import deferred
from unishard.distributed.on_ranks import on_first, ranks_of
from unishard.engine.state.autosave import EXIT_CODE, Autosave
from unishard.engine.state.lineage import Lineage, RunName
from unishard.engine.state.restore import restore
from unishard.engine.state.run import Run
from unishard.engine.state.snapshot import take_snapshot
from unishard.errors import CheckpointError, ContractError, RankMismatchError

_logger = logging.getLogger("unishard")

_savers: WeakValueDictionary[Path, SaveAndLoad] = WeakValueDictionary()
"""The open engine of this process that saves in each directory."""


class SaveAndLoad:
    """Saves, loads and exports one run. The methods implement those of `Engine` with the same names."""

    def __init__(self, run: Run) -> None:
        """Set up background and automatic saves. Collective."""
        self._run = run
        self._asked = run.checkpoint
        self._plans = PlanCache(background=self._asked.async_save)
        self._autosave = Autosave(self._asked) if run.accumulation is not None else None
        self._background = Background(ready=self._asked.async_save)
        self._state_to_save: Callable[[], Any] | None = None
        self._dir = (
            None if self._asked.dir is None else path_of(self._asked.dir, "checkpoint.dir").absolute()
        )  # now: the script may change its directory later
        self._lineage = Lineage(self._dir, self._asked.on_existing)
        self._retention = Retention(
            self._asked.keep_last, self._asked.keep_every, self._asked.keep_best, self._asked.best
        )
        self._owned: set[Path] = set()
        """The directories in which this run saves."""
        self._cleaned: set[Path] = set()
        self._leaving: set[Path] = set()
        """Those that it releases as soon as no save is running."""
        self.resumed: Resumed | None = None
        """The last load."""
        self._download: Download | None = None
        self._copies: RunCopies | None = None
        try:
            self._copies = self._open_copies()
        except BaseException:
            self.close()
            raise
        self._check_before_update()

    def _open_copies(self) -> RunCopies | None:
        if self._dir is None or self._asked.copy_to is None:
            return None
        root = self._dir
        copies = RunCopies(
            self._asked.copy_to,
            root,
            self._retention,
            process_group.host_group(),
            writes=self._run.accumulation is not None,
            refuses=self._asked.on_existing == "error",
            run=lambda: self._lineage.run_in(root),
        )
        if copies.known is not None:
            self._lineage.places[copies.url] = copies.known
        return copies

    @property
    def deletes(self) -> bool:
        """Whether saving deletes older checkpoints."""
        return self._asked.keep_last is not None

    @property
    def copy_to(self) -> str | None:
        """Where checkpoints are copied."""
        return self._asked.copy_to

    @deferred()
    @without_collections()
    def save(self, root: str | Path | None, *, state: Any, metric: Any = None) -> Path:
        """Save the run."""
        with self._run.observers.saving():
            return self._save(root, state, metric)

    def _save(self, root: str | Path | None, state: Any, metric: Any) -> Path:
        order = self._run.order
        order.require("save")
        number = _number(metric)
        place = self._directory(root, "save")
        self._claim(place)
        order.ranks.check_now("save", f", to {root or self._asked.dir}")
        self._drop_average()
        group = process_group.host_group()
        _require_same(number, group)
        self.wait()
        self._run.adapter.reshard_all()
        snapshot = take_snapshot(self._run, state, self._run.buffers.merged("save"), group)
        if self._autosave is not None:
            self._autosave.saved()
        self._own(place)
        name = on_first(group, lambda: self._begin(place, snapshot.step))
        snapshot = snapshot._replace(
            run=name.run, other_run_present=name.other_run_present, facts={**snapshot.facts, "metric": number}
        )
        if self._asked.async_save:
            copy = self._background.stage(snapshot)
            self._background.start(lambda own: self._write(place, copy, own))
            return place / finding.name_of(snapshot.step, name.run if name.other_run_present else "")
        return self._write(place, snapshot, group)

    def _write(self, place: Path, snapshot: Snapshot, group: dist.ProcessGroup) -> Path:
        """Write a checkpoint, and let it be copied. Collective."""
        copies = self._copies
        if copies is None or self._dir is None or place.resolve() != self._dir.resolve():
            return save(place, snapshot, self._retention, group, cache=self._plans)
        after = snapshot._replace(after=copies.last_commit)
        folder = save(place, after, self._retention, group, cache=self._plans, held=lambda: copies.copying)
        copies.saved(folder)
        return folder

    def _begin(self, root: Path, step: int) -> RunName:
        """Rank 0: the run under which a step is saved; before the first save in a directory, clean up after a killed
        run.
        """
        ownership.follow(root, self, lambda: self._lineage.run_in(root))
        name = self._lineage.name(root, step)
        if root.resolve() not in self._cleaned:
            directory.clean(root)
            self._cleaned.add(root.resolve())
        return name

    def on_save(self, state: Callable[[], Any]) -> None:
        """Set the user state for automatic saves."""
        self._state_to_save = state

    def save_if_due(self) -> None:
        """Save at the end of a window if an automatic save is due, and end the process after a signal. Collective."""
        cause = None if self._autosave is None else self._autosave.due(self._run.order.place.updates)
        if cause is None:
            return
        folder = self.save(None, state=None if self._state_to_save is None else self._state_to_save())
        if cause.ends:
            self.wait()
            _logger.warning("%s: saved in %s; the process ends with exit code %d", cause.text, folder, EXIT_CODE)
            raise SystemExit(EXIT_CODE)

    @without_collections()
    def load(self, source: str | Path, *, strict: bool, verify: str | None, data: bool) -> Resumed | None:
        """Resume from a checkpoint."""
        order = self._run.order
        order.require("load")
        if verify not in ("files", "bits", None):
            raise ContractError(f'load: verify is {verify!r}; pass "files", "bits", or None for no check')
        which = source if source in ("latest", "best") else None
        url = url_of(source) if isinstance(source, str | Path) else None
        place = None if url else self._directory(None if which else source, "load")
        description = f"{which} of {self._asked.dir}" if which else source
        order.ranks.check_now("load", f", from {description}, strict={strict}, verify={verify}, data={data}")
        group = process_group.host_group()
        self.wait()
        self._let_go()
        if place is None:
            self._download = Download(str(url), group)
            folder: Path | None = self._download.folder
        else:
            folder = self._found(place, which, group)
        if folder is None:
            if dist.get_rank() == 0:
                _logger.info("no checkpoint in %s; training starts from the beginning", place)
            return None
        self.resumed = restore(self._run, folder, group, strict=strict, verify=verify, data=data)
        if self._download is not None:
            self.resumed = self.resumed._replace(path=Path(self._download.url))
        if dist.get_rank() == 0:
            self._lineage.resumed(folder, self.resumed.path)
        if self._run.tensors.saved_average is None:  # which is read when it is asked for
            self._let_go()
        if self._copies is not None and folder.parent == self._dir and (header := header_of(folder)):
            self._copies.catch_up(header.run)
        for tell in self._run.observers.on_load:
            tell()
        self._check_before_update()
        return self.resumed

    def _found(self, place: Path, which: str | Path | None, group: dist.ProcessGroup) -> Path | None:
        """What a user asks for in a directory; None if it is the latest and there is none. Collective."""
        self._own_to_resume(place, which)
        if self._copies is not None and which is not None:
            self._copies.fetch(str(which), self._asked.best, group)
        return on_first(group, lambda: self._located(place, which))

    def _located(self, place: Path, which: str | Path | None) -> Path | None:
        """The same on rank 0."""
        if which == "latest":
            checkpoint, lost = finding.latest(place), finding.newer_than_latest(place)
            if lost is not None and checkpoint is None:
                raise CheckpointError(f"{lost}; a new run does not begin in its place")
            if lost is not None:
                _logger.warning("%s; the run continues from %s", lost, checkpoint)
            return checkpoint
        if which is None:
            return finding.locate(place, "latest")
        best = finding.best(place, self._asked.best)
        if best is None:
            raise CheckpointError(
                f"{place}: no checkpoint of the newest run has a metric; pass one, as in engine.save(metric=0.31)"
            )
        return best

    def _check_before_update(self) -> None:
        """Before the next update, check that the run owns `checkpoint.dir`, and that no average is lost in silence."""
        if self._run.accumulation is not None:
            self._run.accumulation.before_update = self._before_update

    def _before_update(self) -> None:
        if self._dir is not None:
            on_first(process_group.host_group(), self._lineage.admit)
            if self._asked.automatic or self._asked.on_signal:
                self._own(self._dir)
        self._drop_average()

    def _own(self, root: Path) -> None:
        """Make this run the owner of a directory in which it is going to save. Collective the first time."""
        if root not in self._owned:
            ownership.own(root, self, lambda: self._lineage.run_in(root), process_group.host_group())
            self._owned.add(root)

    def _own_to_resume(self, place: Path, which: str | Path | None) -> None:
        """Own `checkpoint.dir` before its run is continued, so that nobody else saves there from then on.

        Collective.
        """
        root = self._dir
        if (
            root is None
            or self._run.accumulation is None
            or root.resolve() not in (place.resolve(), place.resolve().parent)
        ):
            return

        def run() -> str:
            return self._lineage.run_in(root, finding.latest(root) if which else place)

        ownership.own(root, self, run, process_group.host_group(), writes=False)

    def _drop_average(self) -> None:
        """Warn of a moving average that is loaded no more: the weights move on, or are saved without it."""
        self._let_go()
        saved, self._run.tensors.saved_average = self._run.tensors.saved_average, None
        if saved is not None and dist.get_rank() == 0:
            _logger.warning(
                "%s: its moving average of the weights is not resumed; to resume it, call "
                "engine.weights.average(decay) before the first training forward, and before a save",
                saved.folder,
            )

    def _let_go(self) -> None:
        """Delete what was fetched for the last load."""
        if self._download is not None:
            self._download.close()
            self._download = None

    def export(
        self, folder: str | Path, *, dtype: str | None, max_shard_size: int | str, tokenizer: Any, overwrite: bool
    ) -> Path:
        """Export the weights in Hugging Face's layout."""
        self._run.order.require("export")
        self._run.order.ranks.check_now("export", f", to {folder}, overwrite={overwrite}")
        self._run.adapter.reshard_all()
        merged = self._run.buffers.merged("export").values
        export(
            folder,
            self._run.adapter.module,
            self._run.tensors.to_export(merged),
            dtype=dtype,
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
            overwrite=overwrite,
            group=process_group.host_group(),
        )
        if self._copies is not None:
            self._copies.exported(Path(folder).absolute())
        return Path(folder)

    def wait(self) -> None:
        """Wait until the background save is complete."""
        self._background.wait()
        self._release_left()

    def leave(self, root: str | Path) -> None:
        """Release a directory."""
        self._leaving.add(self._directory(root, "leave"))
        if not self._background.is_running:
            self._release_left()

    def _release_left(self) -> None:
        for root in self._leaving:
            if _savers.get(root.resolve()) is self:
                del _savers[root.resolve()]
            self._owned.discard(root)
            self._cleaned.discard(root.resolve())
            ownership.release(self, root)
        self._leaving.clear()

    def close(self) -> None:
        """Restore signal handlers, release this engine's directories, and wait for the background save and copies."""
        self._let_go()
        if self._autosave is not None:
            self._autosave.close()
        for root in [root for root, saver in _savers.items() if saver is self]:
            del _savers[root]
        try:
            self._background.close()
        finally:
            self._plans.close()
            try:
                if self._copies is not None:
                    self._copies.close()
            finally:
                ownership.release(self)

    def _claim(self, root: Path) -> None:
        """Reserve a directory: two engines, such as those of a GAN, would replace each other's checkpoints of the same
        step.
        """
        owner = _savers.get(root.resolve())
        if owner is not None and root in owner._leaving:
            owner.wait()
        if _savers.setdefault(root.resolve(), self) is not self:
            raise ContractError(
                f"save: another engine of this process saves in {root}; use a directory per engine, or close the other "
                "engine first"
            )

    def _directory(self, folder: str | Path | None, call: str) -> Path:
        place = self._dir if folder is None else path_of(folder, call).absolute()
        if place is None:
            raise ContractError(
                f"{call} needs a directory; pass one, as in engine.{call}('checkpoints'), or set checkpoint.dir in the "
                "config"
            )
        if os.path.islink(place) and not os.path.exists(place):  # perhaps put there since the run began
            raise CheckpointError(
                f"{call}: {place} is a link to {os.readlink(place)}, where no directory is; remove the link, or make "
                "that directory"
            )
        return place


def _number(metric: Any) -> float | None:
    """A metric as a number.

    Raises:
        ContractError: It is none.
    """
    try:
        return None if metric is None else float(metric + 0)  # a text is no number
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        raise ContractError(
            f"save: metric must be a number, got {metric!r}; pass one such as engine.mean(loss)"
        ) from None


def _require_same(metric: float | None, group: dist.ProcessGroup) -> None:
    """Check that all ranks pass the same metric. Collective.

    Raises:
        RankMismatchError: They do not.
    """
    if not agreement.equal(metric, group):
        everyone = ranks_of(group).gather(metric)
        values = ", ".join(f"rank {rank} has {each!r}" for rank, each in enumerate(everyone[:8]))
        raise RankMismatchError(
            f"save: the ranks pass different metrics: {values}; pass the mean over the ranks, engine.mean(value)"
        )
