"""Writes a line for each record on standard error: in a terminal one that is updated in place, elsewhere plain
lines.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console

from unishard.contract.plan import ObserveSpec
from unishard.observe.destinations.writer import Values

if TYPE_CHECKING:
    from rich.live import Live

_SHORT = {
    "grad_norm": ("norm", "{:.3g}"),
    "lr": ("lr", "{:.2e}"),
    "loss": ("loss", "{:.4f}"),
    "mfu": ("mfu", "{:.1%}"),
    "memory_gib": ("memory", "{:.2f} GiB"),
    "skipped_updates": ("skipped", "{:.0f}"),
    "checkpoint_seconds": ("checkpoint", "{:.1f} s"),
}
"""What the line says for the engine's own values."""
_HIDDEN = {"samples_per_second": "tokens_per_second", "step_seconds": "samples_per_second"}
"""Values that the line leaves out where another one says the same."""
_NEVER = ("tflops", "sent_gib")
"""Values that it never has."""
_LATE = {"checkpoint_seconds"}
"""What follows the record of a step and is not worth a second line."""


class ProgressLine:
    """Shows step, values and the time left, if `scheduler.total_steps` says when the training ends."""

    def __init__(self, spec: ObserveSpec, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total = spec.total_steps
        self._first: tuple[float, int] | None = None
        self._live: Live | None = None
        self._shown: tuple[int, Values] | None = None

    def write(self, step: int, values: Values) -> None:
        """Show a record."""
        now = time.monotonic()
        self._first = self._first or (now, step)
        earlier = self._shown[1] if self._shown and self._shown[0] == step else {}
        self._shown = step, {**earlier, **values}
        plain = not self._console.is_terminal or self._console.is_dumb_terminal
        if plain and earlier and values.keys() <= _LATE:
            return
        line = "  ".join([*self._position(step, now), *_parts(values if plain else self._shown[1])])
        if plain:
            print(line, file=self._console.file, flush=True)  # directly to the file: a console would wrap the line
            return
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            # The script's own output appears above the line, but stays on standard output if that is a file.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def resume(self, step: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Leave the last line."""
        if self._live is not None:
            self._live.stop()

    def _position(self, step: int, now: float) -> list[str]:
        if self._total is None:
            return [f"step {step}"]
        (then, first), parts = self._first or (now, step), [f"step {step}/{self._total}"]
        if step > first:
            minutes, seconds = divmod(round(max(0, self._total - step) * (now - then) / (step - first)), 60)
            parts.append(f"left {minutes // 60}:{minutes % 60:02}:{seconds:02}")
        return parts


def _parts(values: Values) -> list[str]:
    parts = []
    for name, value in values.items():
        if name in _NEVER or _HIDDEN.get(name) in values or (name == "skipped_updates" and not value):
            continue
        if name.endswith("_per_second"):
            parts.append(f"{short(value)} {name.removesuffix('_per_second')}/s")
        else:
            word, form = _SHORT.get(name, (name, "{:.4g}"))
            parts.append(f"{word} {form.format(value)}")
    return parts


def short(number: float) -> str:
    """A number in three digits with its unit, such as `1.5M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
