"""Shows the progress of a training loop: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from weakref import WeakSet

import rich.progress as bars
import torch
from rich.console import Console
from rich.table import Column
from torch import Tensor

from unishard.contract.results import Step
from unishard.observe.destinations.progress import short
from unishard.observe.observer import Observer

_BAR_SECONDS = 0.25
_LINE_SECONDS = 5.0
_RECENT_UPDATES = 50
_BAR_WIDTH = 120
"""Minimum terminal width to show a bar beside the figures."""


_open: WeakSet[Progress] = WeakSet()


def has_terminal() -> bool:
    """Whether a progress bar of a loop is shown, which has the terminal for itself."""
    return bool(_open)


class Progress(Observer):
    """Shows steps done, loss, throughput, learning rate, gradient norm, memory and time left, on standard error.

    Recording takes microseconds and never waits for the device; only displaying does (it reads loss and norm), at most
    four times a second. The loss is this rank's, averaged over the accumulation window; throughput is this rank's times
    the number of ranks that read samples of their own.
    """

    def __init__(
        self,
        total: int | None,
        device: torch.device,
        *,
        readers: int = 1,
        console: Console | None = None,
    ) -> None:
        """Start the display.

        Args:
            total: Optimizer steps in all, if known.
            device: The device whose memory is shown; for a CPU, the memory of this process.
            readers: Ranks, or groups of them that share samples.
            console: Where to print; default: standard error.
        """
        self._total = total
        self._device = device
        self._readers = readers
        self._unit = "tokens"
        self._units_seen = 0
        self._updates = 0
        self._losses: list[Tensor] = []
        self._items: list[int | Tensor] = []
        self._window: tuple[list[Tensor], list[int | Tensor]] = [], []
        """Losses and items of the last window."""
        self._step: Step | None = None
        self._started = self._shown_at = time.perf_counter()
        self._shown_updates = 0
        self._recent = deque([(self._started, 0, 0)], maxlen=_RECENT_UPDATES)
        self._console = console or Console(stderr=True)
        self._bar = (
            _start_bar(self._console, self._total)
            if self._console.is_terminal and not self._console.is_dumb_terminal
            else None
        )
        _open.add(self)
        self._interval = _LINE_SECONDS if self._bar is None else _BAR_SECONDS

    def record_batch(self, batch: Any) -> None:
        """Record a micro-batch that was read."""
        tensor, self._unit = _measured(batch)
        if tensor is not None:
            self._units_seen += self._readers * (
                tensor.numel() if self._unit == "tokens" else len(tensor) if tensor.ndim else 1
            )

    def on_loss(self, loss: Tensor, num_items: int | Tensor = 1) -> None:
        """Keep a loss, and how many items it sums over, on the device."""
        self._losses.append(loss.detach().reshape(()).float())
        self._items.append(num_items)

    def on_discard(self) -> None:
        """Forget the losses since the last optimizer step."""
        self._losses, self._items = [], []

    def on_step(self, step: Step) -> None:
        """Refresh the display, if it is due."""
        now = time.perf_counter()
        self._updates += 1
        self._step = step
        self._window, self._losses, self._items = (self._losses, self._items), [], []
        self._recent.append((now, self._updates, self._units_seen))
        if self._updates == 1 or now - self._shown_at >= self._interval:
            self._show(now)

    def close(self) -> None:
        """Show the last state and release the terminal."""
        if self._updates > self._shown_updates:
            self._show(time.perf_counter())
        if self._bar is not None:
            self._bar.stop()
        _open.discard(self)

    def _show(self, now: float) -> None:
        self._shown_at, self._shown_updates = now, self._updates
        if self._bar is not None:
            self._bar.update(bars.TaskID(0), completed=self._updates, line=self._line(), refresh=True)
        else:
            # Directly to the file: a console would wrap the line.
            print(self._line(), file=self._console.file, flush=True)

    def _line(self) -> str:
        """The status line, most important figures first: a narrow terminal truncates it."""
        (then, updates, seen), (now, done, units) = self._recent[0], self._recent[-1]
        seconds = max(now - then, 1e-9)
        parts = [f"step {done}" if self._total is None else f"step {done}/{self._total}"]
        losses, items = self._window
        if losses:
            parts.append(f"loss {torch.stack(losses).sum().item() / max(1, int(sum(items))):.4f}")
        if self._total is not None:
            parts.append(f"left {_clock((self._total - done) * seconds / (done - updates))}")
        parts += [
            f"{short((units - seen) / seconds)} {self._unit}/s",
            f"lr {0.0 if self._step is None else self._step.lr:.2e}",
        ]
        if self._step is not None and self._step.grad_norm is not None:
            parts.append(f"norm {self._step.grad_norm:.3g}" + (" (skipped)" if self._step.skipped else ""))
        parts += [_memory(self._device), f"elapsed {_clock(now - self._started)}"]
        return "  ".join(parts)


def _start_bar(console: Console, total: int | None) -> bars.Progress:
    line = bars.TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = [bars.BarColumn(bar_width=20), line] if console.width >= _BAR_WIDTH else [line]
    # The script's output appears above the bar, but stays on standard output if that is a file.
    bar = bars.Progress(*columns, console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
    bar.add_task("", total=total, line="")
    bar.start()
    return bar


def _measured(batch: Any) -> tuple[Tensor | None, str]:
    """The tensor that throughput is counted by, and the unit: its elements are tokens, or its first dimension
    samples.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", None)
    return (ids, "tokens") if isinstance(ids, Tensor) else (_first_tensor(batch), "samples")


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Mapping):
        items: Iterable[Any] = batch.values()
    elif isinstance(batch, list | tuple):
        items = islice(batch, 8)
    else:
        items = getattr(batch, "__dict__", {}).values()
    return next((tensor for item in items if (tensor := _first_tensor(item)) is not None), None)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _memory(device: torch.device) -> str:
    """The device's peak allocated memory, or this process's current resident memory."""
    if device.type == "cuda":
        size = torch.cuda.max_memory_allocated(device)
    elif sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    else:
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
