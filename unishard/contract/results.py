"""Results of an engine's calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, overload


class Step(Sequence[Any]):
    """What one call of `Engine.step` did. Reads like a named tuple.

    `updated`, `skipped` and `grad_norm` come from the device. It need not be through with the update when `step`
    returns: the first access to one of them waits until the gradient norm is computed, on this rank only. Read them
    only where you use them, such as where you log, and the host stays ahead of the device.
    """

    __slots__ = ("_ended", "_lr", "_norm", "_updated")
    _fields: ClassVar[tuple[str, ...]] = ("updated", "grad_norm", "lr", "skipped")

    def __init__(self, updated: bool, grad_norm: float | None, lr: float, skipped: bool) -> None:
        """A step whose outcome is known."""
        self._lr = lr
        self._ended = updated or skipped
        self._updated: bool | None = updated
        self._norm: float | Callable[[], float] | None = grad_norm

    @classmethod
    def pending(cls, norm: Callable[[], float], updated: bool | None, lr: float) -> Self:
        """A step at the end of a window.

        Args:
            norm: Waits for the gradient norm.
            updated: Whether the update was made; None: if the norm is finite.
            lr: As the attribute.
        """
        step = cls(updated=True, grad_norm=None, lr=lr, skipped=False)
        step._updated, step._norm = updated, norm
        return step

    @property
    def ended(self) -> bool:
        """Whether the accumulation window ended, so that an update was made or skipped. Never waits."""
        return self._ended

    @property
    def updated(self) -> bool:
        """Whether the parameters were updated: true at the end of an accumulation window, unless the update was
        skipped.
        """
        if self._updated is None:
            self._read()
        return bool(self._updated)

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the averaged gradients before clipping, in fp32; None inside a window, infinite if a
        gradient is not finite.
        """
        return self._read()

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group in this update; inside a window, in the coming one.

        Never waits.
        """
        return self._lr

    @property
    def skipped(self) -> bool:
        """Whether an update was due but skipped, because a gradient was infinite or NaN."""
        return self._ended and not self.updated

    def _read(self) -> float | None:
        if callable(self._norm):
            norm = self._norm()
            finite = math.isfinite(norm)
            self._updated = finite if self._updated is None else self._updated
            self._norm = norm if finite else math.inf  # of NaN, some engines only report that the norm is not finite
        return self._norm

    # -- as a named tuple --------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._fields)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return (self.updated, self.grad_norm, self._lr, self.skipped)[index]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Step | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Step({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self)

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes: Any) -> Step:
        return Step(**{**self._asdict(), **changes})


class Placement(NamedTuple):
    """What an engine holds on this rank after `prepare`, from its live tensors."""

    engine: str
    """Class that runs the model, such as `DeepSpeedEngine`."""
    units: tuple[str, ...]
    """Names of the modules whose parameters are gathered together, without the root; empty if the engine has no
    units."""
    master_dtypes: frozenset[str]
    """Dtypes of the weights that the optimizer updates, such as `{"float32"}`."""
    master_numel: int
    """Elements of trainable master weights on this rank, including padding."""
    param_bytes: int
    """Bytes of the model's parameters on this rank between steps."""


class Resumed(NamedTuple):
    """Where a run continues after `Engine.load`."""

    path: Path
    """The checkpoint; of a URL that as a path, which `load` takes again."""
    step: int
    """Accumulation windows that had ended when it was saved, including skipped updates."""
    epoch: int | None
    """Epoch of the training data, counted from 0: as its loader or `engine.batches` has counted it. None if it is
    unknown: count it yourself, and save it in `state`."""
    state: Any
    """The user's `state`; None if there was none."""
    notes: tuple[str, ...]
    """Differences from the saved run: what did not match, what the config changes, what could not be resumed."""
