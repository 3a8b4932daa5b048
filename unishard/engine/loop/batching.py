"""How batches come to the loop: moved to the device, in accumulation windows whose true length the engine knows."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unishard.config import Config
from unishard.data import position
from unishard.data.batches import Window, warn_of_same_samples, windows
from unishard.data.position import LoaderPass, Position, StatefulLoader
from unishard.data.progress import Progress
from unishard.engine.loop.lockstep import Turns
from unishard.errors import ContractError

__all__ = ["Feeding"]


class Feeding(ABC):
    """Yields a loader's batches and opens their accumulation windows. `TrainingEngine` inherits it."""

    _cfg: Config
    _module: nn.Module
    _device: torch.device
    _turns: Turns | None
    _window: int
    """Micro-batches in the accumulation window that is open."""
    _micro_batch: int
    """Those of them that are done."""
    _discarded: bool
    """Whether the window was dropped."""
    _progress: Progress | None
    _updates: int
    """Accumulation windows that have ended."""
    _reading: LoaderPass | None = None
    """Of the training loader whose batches came last, None if it cannot say where it is."""
    _updates_before: int = 0
    """When the last window was taken from it."""
    _resumed: tuple[Sequence[Position], int] | None = None
    """Positions and number of ranks of the run that this one continues, until a training loader has taken them."""

    @abstractmethod
    def _enter(self, call: str, detail: str = "") -> None: ...

    @abstractmethod
    def _require_open(self, call: str) -> None: ...

    @abstractmethod
    def _mark_last(self, loader: Iterable[Any], batches: Iterable[Any]) -> Iterator[Any]: ...

    def batches(self, loader: Iterable[Any], *, progress: bool = False) -> Iterator[Any]:
        """This rank's batches, moved to the device. Collective: all ranks must iterate.

        Looks one accumulation window ahead, so that the incomplete one at the end is divided by its true length
        (`training.last_window: step`) or left out (`drop`). In evaluation mode there are no windows: every batch is yielded, also
        while the training loop outside is in the middle of one.

        Args:
            loader: Yields this rank's own batches; every rank must yield the same number, as `unishard.dataloader` does, but inside
                `lockstep`.
            progress: Show a progress bar on rank 0 (plain lines without a terminal).

        Raises:
            ContractError: A batch was not followed by backward and step, or an earlier loop stopped inside a window.
            RankMismatchError: The ranks' loaders have different lengths.
        """
        if self._module.training:
            yield from self._training_batches(loader, progress)
        else:
            yield from self._mark_last(loader, chain.from_iterable(self.windows(loader, progress=progress)))

    def _training_batches(self, loader: Iterable[Any], progress: bool) -> Iterator[Any]:
        for window in self.windows(loader, progress=progress):
            for batch in window:
                yield batch
                if self._discarded:
                    break  # the rest of a window that was dropped

    def windows(self, loader: Iterable[Any], *, lengths: Iterable[int] | None = None, progress: bool = False) -> Iterator[Window]:
        """This rank's batches in accumulation windows, one for each update. Collective: all ranks must iterate.

        Like `batches`, for loops that want to see a whole window before its first forward, or windows of changing length.

        Args:
            loader: Yields this rank's own batches; every rank must yield the same number.
            lengths: Batches in each window, the same on every rank; left out, `training.gradient_accumulation_steps` in each. It
                ends the loop if it ends first.
            progress: Show a progress bar on rank 0 (plain lines without a terminal).

        Yields:
            The batches of one window, each moved to the device when it is taken out.

        Raises:
            ContractError: As `batches`; or a length is not positive.
            RankMismatchError: The ranks' loaders have different lengths.
        """
        self._require_open("batches")
        warn_of_same_samples(loader)
        training, length = self._module.training, self._cfg.training.gradient_accumulation_steps
        drop = training and self._cfg.training.last_window == "drop"
        if training:
            loader = self._begin_reading(loader, length if drop and lengths is None else 1)
        bar = Progress(loader, length, self._device, drop=drop) if progress and dist.get_rank() == 0 else None
        outer, self._progress = self._progress, bar
        try:
            enter = None if self._turns else self._enter  # inside `lockstep` the ranks may have different numbers of batches
            for window in windows(loader, repeat(length) if lengths is None else lengths, self._device, drop=drop, enter=enter):
                if training:
                    self._begin_window(len(window))
                yield window if bar is None else window.watched_by(bar.record_batch)
                if training:
                    self._keep_position()
            if training:
                self._begin_window(length)
                self._keep_position()
        finally:
            if training and not self._micro_batch:
                self._window = length
            self._progress = outer
            if bar is not None:
                bar.close()

    def _begin_window(self, length: int) -> None:
        if self._micro_batch:
            raise ContractError(
                f"a new accumulation window starts after {self._micro_batch} of {self._window} micro-batches of the last one; "
                "call backward and step for every batch, and leave a loop only when step().updated or step().skipped is true"
            )
        self._window, self._discarded = length, False

    # -- where the data is ------------------------------------------------------------------------------------------------

    def _begin_reading(self, loader: Iterable[Any], window: int) -> Iterable[Any]:
        """The loader, from where the run that this one continues was, if nobody has gone on from there yet."""
        if not isinstance(loader, StatefulLoader):
            self._reading = None
            if self._resumed is not None:
                warnings.warn(
                    f"{type(loader).__name__} has no load_state_dict, so it begins anew and not at the checkpoint's data position; "
                    "train with unishard.dataloader(dataset, cfg)",
                    UserWarning,
                    stacklevel=3,
                )
            return loader
        resumed, self._resumed = self._resumed, None
        done = 0 if resumed is None else position.resume(loader, *resumed, dist.get_rank(), dist.get_world_size())
        self._reading = LoaderPass(loader, done, window)
        self._updates_before = self._updates
        return self._reading

    def _keep_position(self) -> None:
        if self._reading is not None:
            self._reading.keep()
        self._updates_before = self._updates

    def _data_position(self) -> Position | None:
        """Where this rank's training loader is, after the windows that are done. One that is out but not trained on is not counted.

        Returns:
            What `_resume_data` takes; JSON but for what the loader's own state holds. None if there was no training loader, or the
            last one has no `state_dict` and `load_state_dict`.
        """
        if self._resumed is not None:
            return position.of_rank(*self._resumed, dist.get_rank(), dist.get_world_size())
        if self._reading is None:
            return None
        untouched = self._updates == self._updates_before and not self._discarded
        return self._reading.before if untouched else self._reading.position()

    def _resume_data(self, positions: Sequence[Position | None], world_then: int) -> None:
        """Let the next training loader go on where the ranks of another run were.

        Args:
            positions: What `_data_position` returned on each of its ranks. Where it was None, nobody goes on.
            world_then: How many they were.
        """
        known = [where for where in positions if where is not None]
        self._resumed = (known, world_then) if known and len(known) == len(positions) else None
        self._reading = None

    @staticmethod
    def _epoch_of(data_position: Position) -> int | None:
        """The epoch in which a position lies, counted from 0; None where only the loader knows."""
        return position.epoch_of(data_position)
