"""Which position in the data a checkpoint has: that of the pass over a training loader that made the last update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unishard.config.data_share import DataShare
from unishard.contract.training_facts import PassFacts
from unishard.data import epochs, position
from unishard.data.epochs import Epochs
from unishard.data.loader import ShareLoader
from unishard.data.position import LoaderPass, Position, StatefulLoader
from unishard.engine.place import LoopPlace, Phase
from unishard.errors import ContractError

_Resumed = tuple[Sequence[Position], int]
"""Positions on all ranks of the resumed run, and their number."""


class TrainingPass:
    """One pass over a loader in training mode."""

    def __init__(self, place: LoopPlace, around: TrainingPass | None, inner: Any, *, drops: bool) -> None:
        self.reading: LoaderPass | None = None
        """The loader with its position; None if it has none."""
        self.around = around
        """The pass that was read before: where it is open, this one is inside its loop."""
        self.open, self.read, self.trained, self.complete = True, False, False, False
        """Whether its loop runs, whether it has read a window, whether updates were made in it, and whether it has read
        to its end."""
        self.loader = type(inner).__name__
        self.data, _ = epochs.reference(getattr(inner, "dataset", inner))
        self.batches = 0
        self.length: int | None = None
        """How many batches its windows had, and how many there are in all; None if unknown."""
        self._place, self._drops = place, drops
        self.kept: Position | None = None
        """The position after the last update that was made in it."""
        self.resumed: _Resumed | None = None
        """What it has resumed from."""
        self.told = False
        """Whether it was said that it has no position."""
        self.updates = place.updates
        """When its last window was read."""
        self.before = place.window, place.discarded, place.phase
        """The state of the loop around it when it began."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to read."""
        return self.length is not None and self.batches == self.used(self.length)

    def used(self, batches: int) -> int:
        """Of so many batches in all, those in its windows; the others are dropped."""
        return self.batches + self._place.full_windows(batches - self.batches)[1] if self._drops else batches

    @property
    def inside(self) -> bool:
        """Whether it is inside the loop of another one."""
        return self.around is not None and self.around.open

    def position(self) -> Position | None:
        """After the updates that were made in it; of a pass without any, inside the loop of another one, that one's."""
        if self.trained:
            return self.kept
        if self.inside and self.around is not None:
            return self.around.position()
        return None if self.reading is None else self.reading.before


_BY_HAND = ("list", "tuple")


class PassCount:
    """Counts the passes in which updates were made, as a loop over epochs does."""

    def __init__(self, loader: str | None = None, epoch: int | None = 0) -> None:
        """Begin.

        Args:
            loader: Class of the loader that the resumed run has read.
            epoch: The epoch to begin in; None if unknown, as once different data were read.
        """
        self._loader, self._now, self._next, self._begun = loader, epoch, epoch, epoch
        self._batches = 0
        self._last: TrainingPass | None = None

    def updated(self, made: TrainingPass | None) -> None:
        """After an update in a pass, or outside of all."""
        if made is None:
            self._now = self._next = None
            return
        if made is not self._last:
            same = self._last is None or (made.data() is not None and made.data() is self._last.data())
            self._begun = self._next if same and not made.inside else None
            self._next = None if self._begun is None else self._begun + 1
            self._last, self._loader = made, made.loader
        self._now, self._batches = (self._next, 0) if made.over else (self._begun, made.batches)

    def ended(self, ended: TrainingPass) -> None:
        """At the end of a pass of which nothing is left."""
        if ended.resumed is not None and not ended.read and self._next is not None:
            self._next += 1  # it was the end of an epoch
        elif ended is not self._last:
            return
        self._now, self._batches = self._next, 0

    def facts(self) -> PassFacts | None:
        """For a checkpoint; None if no loader was read, or only batches that the script has put together."""
        if self._loader is None or (self._now is None and self._loader in _BY_HAND):
            return None
        return PassFacts(loader=self._loader, epoch=self._now, batches=self._batches)


class TrainingPasses:
    """The passes over training loaders of one engine.

    A pass without an update, such as a validation that is in training mode by mistake, leaves the position to the pass
    before it.
    """

    def __init__(self, place: LoopPlace, warn: Callable[[str], None], share: DataShare) -> None:
        self._place, self._warn, self._share = place, warn, share
        self._now: TrainingPass | None = None
        self._updates = 0
        """When a window was last read."""
        self._mixed = False
        """Whether loaders are trained on in turn, so that no single position is right."""
        self._epochs, self._count = Epochs(), PassCount()
        self.resumed: _Resumed | None = None
        """Of the resumed run, until a training loader uses them."""
        self.loads = 0
        """How many checkpoints were loaded with their position."""
        self._left: list[TrainingPass] = []
        """The loops in which the last one was loaded."""

    @property
    def open(self) -> bool:
        """Whether a loop over a training loader runs."""
        return self._now is not None and (self._now.open or self._now.inside)

    def begin(self, loader: Iterable[Any], inner: Iterable[Any], *, drops: bool) -> TrainingPass:
        """Begin a pass, at the resumed position if no loader has used that yet.

        Args:
            loader: What the loop reads.
            inner: The loader in it.
            drops: Whether an incomplete last window is dropped.

        Raises:
            ContractError: It is inside an accumulation window of another loop.
            DataError: The resumed position does not fit the loader, or the loader is too small.
        """
        self._settle()
        if self._now is not None and not self._now.open:
            self._now.around = None  # else each pass would keep all before it
        begun = TrainingPass(self._place, self._now, inner, drops=drops)
        if begun.inside and self._place.inside_window:
            raise ContractError(
                "a loop over engine.batches() in training mode began inside an accumulation window of the loop around "
                "it; for a validation, call engine.eval() before and engine.train() after it"
            )
        positioned = position.with_position(loader, inner)
        if positioned is not None:
            begun.resumed, self.resumed = self.resumed, None
            done = self._resume(positioned, begun.resumed)
            if isinstance(inner, ShareLoader):
                inner.require_enough_samples()
                self._epochs.join(inner)
            begun.reading = LoaderPass(positioned, done, begun.used, loader if positioned is inner else positioned)
        elif self.resumed is not None:
            begun.told = True
            self._warn(
                f"{type(loader).__name__} has no load_state_dict, so it starts from its beginning and not at the "
                "checkpoint's data position; train with unishard.dataloader(dataset, cfg)"
            )
        self._now = begun
        return begun

    def _resume(self, loader: StatefulLoader, resumed: _Resumed | None) -> int:
        """The batches of the epoch that it has read."""
        if resumed is None:
            return 0
        why = position.starts_over(loader, *resumed, *self._share)
        if why is None:
            return position.resume(loader, *resumed, *self._share)
        self._warn(
            f"the loader starts from its beginning and not at the checkpoint's data position: {why}; train with "
            "unishard.dataloader(dataset, cfg)"
        )
        return 0

    def advance(self, of: TrainingPass) -> None:
        """Before a pass reads its next window, or ends: learn what was trained since the last one was read."""
        if self._now is not of and of.updates != self._place.updates and not self._mixed:
            self._mixed = True
            self._warn(
                "two loops over engine.batches() are read in turn in training mode, so a checkpoint has no position in "
                "the data, and a resumed run reads both from their beginning; read one dataset of both, such as a "
                "torch.utils.data.StackDataset or ConcatDataset, or save each loader's state_dict() with your own "
                "state; for a validation, call engine.eval() before and engine.train() after it"
            )
        self._settle()
        self._now, of.updates = of, self._place.updates

    def end(self, ended: TrainingPass) -> None:
        """End a pass, at its end or where the loop was left."""
        if ended.open and ended.over:
            self._count.ended(ended)
        ended.open = False
        place = self._place
        if self._now not in (ended, None):
            return  # another loop has read a window since, whose length counts
        window, discarded, phase = ended.before
        place.leave_loop(window if ended.inside else None)
        if self._now is None or ended.trained or place.updates != self._updates or place.discarded:
            return
        self._now = ended.around
        place.count_as_discarded(discarded)
        if ended.reading is not None and not ended.complete:
            ended.reading.rewind()  # a look at some batches, `next(iter(...))`, uses up no epoch
        if ended.read and self.resumed is None:
            self.resumed = ended.resumed  # for the loader that is trained on
        if ended.inside and phase is Phase.OPEN and place.phase is Phase.FORWARD_DONE:
            self._warn(
                "a loop over engine.batches() inside the training loop ran the model in training mode and made no "
                "update; for a validation, call engine.eval() before and engine.train() after it"
            )

    def _settle(self) -> None:
        """Learn whether an update was made, or dropped, since the last window was read."""
        if self._place.updates == self._updates and not self._place.discarded:
            return
        self._updates = self._place.updates
        self._count.updated(self._now)
        if self._now is None:
            return
        self._now.trained, reading = True, self._now.reading
        self._now.kept = None if reading is None else reading.position()
        if reading is not None and not reading.exact:
            self._warn(
                f"{reading.name} does not yield each batch of the loader in it as soon as it is read, so a checkpoint "
                "has no position in "
                "the data; pass the loader itself: engine.batches(loader) copies to the device while that computes"
            )

    def position(self) -> Position | None:
        """Position of this rank's training loader after the completed windows; a window that was read but not trained
        is not counted.

        Returns:
            The argument of `resume`; JSON except for the loader's own state. None if there was no training loader, or
            the last one has no `state_dict` and `load_state_dict`.
        """
        if self.resumed is not None:
            return position.of_rank(*self.resumed, *self._share)
        self._settle()
        return None if self._mixed or self._now is None else self._now.position()

    def passes(self) -> PassFacts | None:
        """What is known of the epochs, unless the position says it."""
        where, facts = self.position(), self._count.facts()
        if facts is None or (where is not None and position.epoch_of(where) is not None):
            return None
        return facts.model_copy(update={"epoch": None}) if self._mixed else facts

    def left(self, loader: Iterable[Any], inner: Iterable[Any]) -> int | None:
        """Batches that the next pass over a loader will yield; None if unknown."""
        positioned = None if self.resumed is None else position.with_position(loader, inner)
        if positioned is None or self.resumed is None:
            return position.batches_left(inner)
        return position.left_after(positioned, *self.resumed, *self._share)

    def resume(self, positions: Sequence[Position | None], world_then: int, passes: PassFacts | None = None) -> None:
        """Let the next training loader resume at the position of another run.

        Args:
            positions: What `position` returned for each share of its data. If one is None, the loader starts from its
                beginning.
            world_then: That run's number of shares: of its ranks, or of the groups that shared samples.
            passes: What `passes` returned on its rank 0.
        """
        known = [where for where in positions if where is not None]
        self.resumed = (known, world_then) if known and len(known) == len(positions) else None
        self.loads, opened = self.loads + 1, []
        while self._now is not None:
            opened += [self._now] if self._now.open else []
            self._now.open, self._now = False, self._now.around
        self._left = [each for each in opened if each.trained] or opened
        self._mixed, self._updates = False, self._place.updates
        begun = None if self._updates else 0
        self._count = PassCount(None, begun) if passes is None else PassCount(passes.loader, passes.epoch)
        self._epochs.forget()

    def go_on(self) -> None:
        """Let the open loops go on where they are, after a checkpoint was loaded without its position."""
        self._updates, now = self._place.updates, self._now
        while now is not None:
            now.updates, now = self._updates, now.around

    def require_rewind(self, left: TrainingPass, *, has_lengths: bool) -> None:
        """Check that a loop in which a checkpoint was loaded can go back to its position.

        Raises:
            ContractError: It cannot; says why.
        """
        if has_lengths:
            why = "its `lengths` do not go back"
        elif self._left != [left]:
            why = "another one was open, too"
        elif left.reading is None:
            why = f"{left.loader} has no load_state_dict, so it does not go back to the position of the checkpoint"
        elif self.resumed is None:
            why = "the checkpoint has no position in the data"
        else:
            return
        raise ContractError(
            f"engine.load was called inside this loop over engine.batches(), and {why}; write `break` after the load "
            "and begin a new loop, or write engine.load(..., data=False), after which the loop goes on where it is"
        )
