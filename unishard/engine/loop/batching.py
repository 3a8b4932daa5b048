"""Yield batches to the loop: moved to the device, in accumulation windows of known length."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unishard.config import Training
from unishard.config.data_share import DataShare
from unishard.contract.training_facts import PassFacts
from unishard.data.batches import Place, Window, length_of, windows
from unishard.data.loader import ShareLoader
from unishard.data.loader_checks import LoaderChecks
from unishard.data.position import Position
from unishard.data.wrappers import hides_state, instead_of, unwrapped
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.evaluation import Evaluation
from unishard.engine.loop.passes import Passes
from unishard.engine.loop.training_passes import TrainingPass, TrainingPasses
from unishard.observe.observer import Observers
from unishard.observe.progress import Progress


class Batching:
    """Yields a loader's batches and opens accumulation windows.

    Public methods implement those of `Engine` with the same names.
    """

    def __init__(
        self,
        training: Training,
        share: DataShare,
        place: Place,
        module: nn.Module,
        device: torch.device,
        order: CallOrder,
        evaluation: Evaluation,
        observers: Observers,
        warn: Callable[[str], None],
    ) -> None:
        self._drop_last = training.last_window == "drop"
        self._module = module
        self._device = device
        self._order = order
        self._evaluation = evaluation
        self._observers = observers
        self._warn = warn
        self._place, self._readers = place, share.of
        self._checks = LoaderChecks(training, warn, sharing=dist.get_world_size() // share.of)
        self.training = TrainingPasses(order.place, warn, share)
        """The passes in training mode, and the position in the data."""

    def batches(self, loader: Iterable[Any], *, progress: bool) -> Passes[Any]:
        """This rank's batches, moved to the device."""
        return Passes(partial(self._batches, loader, progress), partial(self._length, loader), loader)

    def windows(self, loader: Iterable[Any], *, lengths: Iterable[int] | None, progress: bool) -> Passes[Window]:
        """This rank's batches in accumulation windows."""
        return Passes(
            partial(self._windows, loader, lengths, progress), partial(self._windows_left, loader, lengths), loader
        )

    def _batches(self, loader: Iterable[Any], progress: bool, again: bool) -> Iterator[Any]:
        all_windows = self._windows(loader, None, progress, again)
        if not self._module.training:
            yield from self._evaluation.mark_last(unwrapped(loader), chain.from_iterable(all_windows))
            return
        for window in all_windows:
            loads = self.training.loads
            for batch in window:
                yield batch
                if self._order.place.discarded or self.training.loads != loads:
                    break  # skip the rest of a discarded window

    def _windows(
        self, loader: Iterable[Any], lengths: Iterable[int] | None, progress: bool, again: bool
    ) -> Iterator[Window]:
        """A pass; where a checkpoint is loaded in its loop, it begins again at the position of that."""
        left = yield from self._pass(loader, lengths, progress, again)
        while left is not None:
            self.training.require_rewind(left, has_lengths=lengths is not None)
            left = yield from self._pass(loader, lengths, progress, again, rewound=True)

    def _pass(
        self,
        loader: Iterable[Any],
        lengths: Iterable[int] | None,
        progress: bool,
        again: bool,
        *,
        rewound: bool = False,
    ) -> Generator[Window, None, TrainingPass | None]:
        """Read a loader to its end; returns the pass if a checkpoint was loaded in the loop before."""
        order, training = self._order, rewound or self._module.training
        order.require_open("batches")
        together = (
            self._evaluation.lockstep_open is None
        )  # inside lockstep, ranks may have different numbers of batches
        inner, source = unwrapped(loader), loader
        check = partial(self._checks.begin, inner, training=training, together=together, updates=order.place.updates)
        drop = training and self._drop_last
        reading = self.training.begin(loader, inner, drops=drop and lengths is None) if training else None
        if reading is not None and reading.reading is not None:
            source = reading.reading
        if reading is not None:
            reading.length = length_of(source)
        bar = (
            Progress(self._updates_of(length_of(source), drop=drop), self._device, readers=self._readers)
            if progress and dist.get_rank() == 0
            else None
        )
        outer = self._observers.show(bar)
        empty = True
        try:
            sizes = iter(lambda: order.place.full_window, 0) if lengths is None else lengths
            with self._following(loader, inner, told=reading is not None and reading.told) as look:
                for window in windows(
                    source,
                    sizes,
                    self._device,
                    drop=drop,
                    enter=order.ranks.check_sampled if together else None,
                    begin=None if rewound else check,
                    place=self._place,
                ):
                    look()
                    empty = False
                    if reading is not None:
                        reading.read = True
                        reading.batches += len(window)
                        order.begin_window(len(window))
                        self._checks.window(window)
                    yield window if bar is None else window.watched_by(bar.record_batch)
                    if reading is not None and not reading.open:
                        return reading
                    if reading is not None:
                        self.training.advance(reading)
            if reading is not None:
                reading.complete = True
                order.begin_window(order.place.full_window)
                reading.length = reading.batches if lengths is None else reading.length
            if empty and again and isinstance(loader, Iterator):
                self._warn(
                    f"this pass over engine.batches() read nothing: {type(loader).__name__} is an iterator, which an "
                    "earlier pass has read to its end; pass the loader itself"
                )
            return None
        finally:
            if reading is not None:
                self.training.end(reading)
            self._observers.show(outer)
            if bar is not None:
                bar.close()

    def position(self) -> Position | None:
        """This rank's position in the training data: `TrainingPasses.position`."""
        return self.training.position()

    def resume(self, positions: Sequence[Position | None], world_then: int, passes: PassFacts | None = None) -> None:
        """Let the next training loader resume: `TrainingPasses.resume`."""
        self.training.resume(positions, world_then, passes)

    # -- lengths -----------------------------------------------------------------------------------

    def _length(self, loader: Iterable[Any]) -> int | None:
        """Batches that the next pass yields."""
        if not self._module.training:
            return length_of(loader)
        left = self.training.left(loader, unwrapped(loader))
        return None if left is None else self._order.place.full_windows(left)[1] if self._drop_last else left

    def _windows_left(self, loader: Iterable[Any], lengths: Iterable[int] | None) -> int | None:
        return None if lengths is not None else self._updates_of(self._length(loader))

    def _updates_of(self, batches: int | None, *, drop: bool = False) -> int | None:
        if batches is None:
            return None
        if not self._module.training:
            return -(-batches // self._order.place.full_window)
        windows, used = self._order.place.full_windows(batches)
        return windows + (used < batches and not drop)

    # -- what hides a loader -----------------------------------------------------------------------

    @contextmanager
    def _following(self, loader: Iterable[Any], inner: Iterable[Any], *, told: bool) -> Iterator[Callable[[], None]]:
        """A block that reads a loader; yields what to call after each window: it warns of a loader that is hidden in
        another object.
        """
        before = ShareLoader.unfollowed
        stateful = self._module.training and hides_state(loader)

        def look() -> None:
            nonlocal told
            if not told and (stateful or ShareLoader.unfollowed > before):
                told = True
                self._warn_of_hidden(loader)

        if not isinstance(inner, ShareLoader):
            yield look
            return
        inner.followed += 1
        try:
            yield _nothing
        finally:
            inner.followed -= 1

    def _warn_of_hidden(self, loader: Iterable[Any]) -> None:
        read = ShareLoader.last_unfollowed and ShareLoader.last_unfollowed()
        name = type(loader).__name__
        if self._module.training:
            self._warn(
                f"{name} hides the position of the loader that it reads, so a checkpoint has none, and a resumed run "
                f"reads the data from their beginning; {instead_of(loader)}"
            )
        elif read and read.repeated:
            self._warn(
                f"{name} hides the unishard.dataloader that it reads, so engine.gather_for_metrics cannot leave out "
                f"the {read.repeated} samples that fill up the last batches, and refuses these; {instead_of(loader)}"
            )


def _nothing() -> None:
    """Called where nothing can be hidden."""
