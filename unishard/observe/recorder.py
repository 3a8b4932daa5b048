"""Measure what `logging` asks for, and make a record after every so many optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.contract.adapter import ShardedModel
from unishard.contract.plan import ObserveSpec
from unishard.contract.results import Step
from unishard.distributed import process_group
from unishard.errors import ContractError
from unishard.observe.destinations.opened import Destinations
from unishard.observe.memory import memory_bytes
from unishard.observe.observer import Observer
from unishard.observe.one_number import check_number
from unishard.observe.position import Position
from unishard.observe.progress import has_terminal
from unishard.observe.throughput import flops_per_token, peak_flops, work_of

NAMES = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "step_seconds",
    "tokens_per_second",
    "samples_per_second",
    "tflops",
    "mfu",
    "sent_gib",
    "memory_gib",
    "skipped_updates",
    "checkpoint_seconds",
)
"""The engine's own values."""


class MetricsRecorder(Observer):
    """Measures between two records, and reads what it measured only there: no call waits for the device in between."""

    def __init__(self, spec: ObserveSpec, adapter: ShardedModel, order: Position, sent: Callable[[], int]) -> None:
        """Open the destinations. Collective.

        Args:
            spec: What to measure.
            adapter: The model.
            order: The position in the loop.
            sent: Returns the bytes that this rank is planned to send in a step.
        """
        self._sent: int | Callable[[], int] = sent
        self._every = spec.logging.every_steps
        self._tensor, self._sequence = spec.tensor, spec.sequence
        self._order = order
        self._device = adapter.device
        self._main = dist.get_rank() == 0
        self._to = Destinations(spec, dist.get_rank())
        self._flops, self._peak = flops_per_token(adapter), peak_flops(adapter.device, spec.compute)
        self._losses: list[Tensor] = []
        self._items: list[int | Tensor] = []
        self._steps: list[Step] = []
        """Since the last record; whether they were skipped is read there."""
        self._skipped = 0
        self._due = False
        """Whether a record waits for the next forward."""
        self._reset()

    def _reset(self) -> None:
        """Begin to measure for the next record."""
        self._loss: Tensor | None = None
        self._count: int | Tensor = 0
        self._samples = self._tokens = self._pairs = self._windows = 0
        self._began: float | None = None
        self._paused_at: float | None = None
        self._idle = self._saving = 0.0

    # -- the loop ----------------------------------------------------------------------------------

    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count what a forward in training mode gets. The first one after a record writes it."""
        if self._due:
            self._write()
            self._due = False
        order = self._order
        if order.begins_window:  # a new window; what is left was discarded
            self._losses, self._items = [], []
        if self._began is None:
            self._began = time.perf_counter()
        work = work_of(args, kwargs)
        self._samples += work.samples
        self._tokens += work.tokens
        self._pairs += work.tokens * work.length

    def on_loss(self, loss: Tensor, num_items: int | Tensor) -> None:
        """Keep a loss, and how many items it sums over."""
        self._losses.append(loss.detach().reshape(()))
        self._items.append(num_items)

    def on_step(self, step: Step) -> None:
        """Add the window that has ended. After every `logging.every_steps` windows, measure: collective."""
        total, self._losses = torch.stack(self._losses).double().sum(), []
        self._loss = total if self._loss is None else self._loss + total
        self._count, self._items = self._count + sum(self._items), []
        self._steps.append(step)
        self._windows += 1
        if self._order.updates % self._every == 0:
            values = self._measure(step)
            if self._main:
                self._to.measured(values, self._order.updates)
            self._reset()
            self._began = time.perf_counter()
            self._due = True

    def _measure(self, step: Step) -> dict[str, float]:
        self._skipped += sum(ended.skipped for ended in self._steps)
        self._steps = []
        now = time.perf_counter()
        seconds = max(now - (now if self._began is None else self._began) - self._idle, 1e-9)
        loss = 0.0 if self._loss is None else float(self._loss)
        sums = torch.tensor([loss, float(self._count), self._samples, self._tokens, self._pairs], dtype=torch.float64)
        memory = torch.tensor(memory_bytes(self._device), dtype=torch.float64)
        world = dist.get_world_size()
        if world > 1:
            group = process_group.host_group()
            dist.all_reduce(sums, group=group)
            dist.all_reduce(memory, dist.ReduceOp.MAX, group=group)
        loss, count, samples, tokens, pairs = sums.tolist()
        samples, tokens = samples / self._tensor / self._sequence, tokens / self._tensor
        pairs *= self._sequence / self._tensor  # a part of the tokens, and of the length
        values = {"loss": loss / count if count else float("nan")}
        if step.grad_norm is not None:
            values["grad_norm"] = step.grad_norm
        values |= {"lr": step.lr, "step_seconds": seconds / self._windows}
        if tokens:
            values["tokens_per_second"] = tokens / seconds
        values["samples_per_second"] = samples / seconds
        if tokens:
            flops = (self._flops.fixed * tokens + self._flops.per_length * pairs) / seconds / world
            values["tflops"] = flops / 1e12
            if self._peak is not None:
                values["mfu"] = flops / self._peak
        if callable(self._sent):
            self._sent = self._sent()  # once, and not for a run that ends before its first record
        if self._sent:
            values["sent_gib"] = self._sent / 2**30
        values |= {"memory_gib": memory.item() / 2**30, "skipped_updates": float(self._skipped)}
        return values | ({"checkpoint_seconds": self._saving} if self._saving else {})

    # -- around it ---------------------------------------------------------------------------------

    def on_log(self, values: Mapping[str, float | Tensor]) -> None:
        """Add the user's values to the next record, or to the one of the step that has just ended.

        Raises:
            ContractError: A name is one of the engine's own, or a value is no number.
        """
        for name, value in values.items():
            if name in NAMES:
                raise ContractError(
                    f"log: {name} is a value that the engine logs itself; choose another name, such as my_{name}"
                )
            check_number("log", name, value)
        for name, value in values.items() if self._main else ():
            self._to.logged(
                name,
                value.detach().reshape(()).double() if isinstance(value, Tensor) else float(value),
                self._order.updates,
            )

    def on_evaluate(self, evaluates: bool) -> None:
        """Leave the time of an evaluation out of the throughput."""
        if self._began is None:  # before the first forward, from which on time counts
            return
        now = time.perf_counter()
        if evaluates and self._paused_at is None:
            self._paused_at = now
        elif not evaluates and self._paused_at is not None:
            self._idle += now - self._paused_at
            self._paused_at = None

    def on_save(self) -> None:
        """Write the record of the step that is saved, so that a run that is killed after it and resumed lacks none."""
        if self._due:
            self._write(user_values=False)

    def on_saved(self, seconds: float) -> None:
        """Add a save's time."""
        if self._began is not None and self._paused_at is None:
            self._idle += seconds
        if self._due and self._main:
            self._to.measured({"checkpoint_seconds": seconds}, self._order.updates)
        else:
            self._saving += seconds

    def on_load(self) -> None:
        """Write what waits, such as what was logged of the model that is left, and continue after the step of a
        checkpoint.
        """
        self._write()
        self._reset()
        self._due = False
        self._to.resume(self._order.updates)

    def on_close(self) -> None:
        """Write what waits."""
        self._to.close()

    def _write(self, *, user_values: bool = True) -> None:
        self._to.write(but=("progress",) if has_terminal() else (), user_values=user_values)
