"""Yield batches to the loop: moved to the device, in accumulation windows of known length."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unishard.config import Config
from unishard.data import position
from unishard.data.batches import Window, windows
from unishard.data.epochs import Epochs
from unishard.data.loader import ShareLoader
from unishard.data.loader_checks import LoaderChecks
from unishard.data.position import LoaderPass, Position
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.evaluation import Evaluation
from unishard.engine.loop.progress import Progress
from unishard.errors import DataError
from unishard.hints.arguments import instead

__all__ = ["Batching"]


class Batching:
    """Yields a loader's batches and opens accumulation windows. Public methods implement those of `Engine` with the same names."""

    def __init__(self, cfg: Config, module: nn.Module, device: torch.device, order: CallOrder, evaluation: Evaluation) -> None:
        self._drop_last = cfg.training.last_window == "drop"
        self._module = module
        self._device = device
        self._order = order
        self._evaluation = evaluation
        self._reading: LoaderPass | None = None
        """The current pass over the last training loader; None if the loader has no state."""
        self._updates_before = 0
        """Number of updates when the last window was read from it."""
        self._resumed: tuple[Sequence[Position], int] | None = None
        """Positions and number of ranks of the resumed run, until a training loader uses them."""
        self._epochs = Epochs()
        self._checks = LoaderChecks(cfg)

    def batches(self, loader: Iterable[Any], *, progress: bool) -> Iterator[Any]:
        """This rank's batches, moved to the device."""
        if self._module.training:
            yield from self._training_batches(loader, progress)
        else:
            yield from self._evaluation.mark_last(loader, chain.from_iterable(self.windows(loader, lengths=None, progress=progress)))

    def _training_batches(self, loader: Iterable[Any], progress: bool) -> Iterator[Any]:
        for window in self.windows(loader, lengths=None, progress=progress):
            for batch in window:
                yield batch
                if self._order.discarded:
                    break  # skip the rest of a discarded window

    def windows(self, loader: Iterable[Any], *, lengths: Iterable[int] | None, progress: bool) -> Iterator[Window]:
        """This rank's batches in accumulation windows."""
        order, training = self._order, self._module.training
        order.require_open("batches")
        if hint := instead("loader", loader):
            raise DataError(f"batches needs a loader of batches, got {type(loader).__name__}, {hint}")
        together = self._evaluation.lockstep_open is None  # inside lockstep, ranks may have different numbers of batches
        check = partial(self._checks.begin, loader, training=training, together=together, updates=order.updates)
        drop, length = training and self._drop_last, order.full_window
        if training:
            loader = self._begin_reading(loader, length if drop and lengths is None else 1)
        bar = Progress(loader, length, self._device, drop=drop) if progress and dist.get_rank() == 0 else None
        outer, order.progress = order.progress, bar
        try:
            sizes = repeat(length) if lengths is None else lengths
            for window in windows(loader, sizes, self._device, drop=drop, enter=order.enter if together else None, begin=check):
                if training:
                    order.begin_window(len(window))
                    self._checks.window(window)
                yield window if bar is None else window.watched_by(bar.record_batch)
                if training:
                    self._keep_position()
            if training:
                order.begin_window(length)
                self._keep_position()
        finally:
            if training and not order.micro_batch:
                order.window = length
            order.progress = outer
            if bar is not None:
                bar.close()

    # -- data position ----------------------------------------------------------------------------------------------------

    def _begin_reading(self, loader: Iterable[Any], window: int) -> Iterable[Any]:
        """Start a pass over the loader, at the resumed position if no loader has used that yet."""
        if not position.is_stateful(loader):
            self._reading = None
            if self._resumed is not None:
                warnings.warn(
                    f"{type(loader).__name__} has no load_state_dict, so it starts from its beginning and not at the checkpoint's data "
                    "position; train with unishard.dataloader(dataset, cfg)",
                    UserWarning,
                    stacklevel=3,
                )
            return loader
        resumed, self._resumed = self._resumed, None
        done = 0 if resumed is None else position.resume(loader, *resumed, dist.get_rank(), dist.get_world_size())
        if isinstance(loader, ShareLoader):
            loader.require_enough_samples()
            self._epochs.join(loader)
        self._reading = LoaderPass(loader, done, window)
        self._updates_before = self._order.updates
        return self._reading

    def _keep_position(self) -> None:
        if self._reading is not None:
            self._reading.keep()
        self._updates_before = self._order.updates

    def position(self) -> Position | None:
        """Position of this rank's training loader after the completed windows; a window that was read but not trained is not counted.

        Returns:
            The argument of `resume`; JSON except for the loader's own state. None if there was no training loader, or the
            last one has no `state_dict` and `load_state_dict`.
        """
        if self._resumed is not None:
            return position.of_rank(*self._resumed, dist.get_rank(), dist.get_world_size())
        if self._reading is None:
            return None
        untouched = self._order.updates == self._updates_before and not self._order.discarded
        return self._reading.before if untouched else self._reading.position()

    def resume(self, positions: Sequence[Position | None], world_then: int) -> None:
        """Let the next training loader resume at the position of another run.

        Args:
            positions: What `position` returned on each of its ranks. If one is None, the loader starts from its beginning.
            world_then: That run's number of ranks.
        """
        known = [where for where in positions if where is not None]
        self._resumed = (known, world_then) if known and len(known) == len(positions) else None
        self._reading = None
        self._epochs.forget()
