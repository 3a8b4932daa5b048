"""Measure the outputs of modules, the gradients of these, and the weights, in the steps of `logging.module_steps`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.config import Logging
from unishard.contract.adapter import Updates
from unishard.contract.results import Step
from unishard.distributed import process_group
from unishard.distributed.nested_tensors import tensors_in
from unishard.distributed.shards import norm_of, shard_norms
from unishard.observe.observer import Observer
from unishard.observe.position import Position

FILE = "modules.jsonl"
"""Its name in `logging.dir`."""

_logger = logging.getLogger("unishard")


class ModuleRecorder(Observer):
    """Registers hooks for the chosen steps only; in all others it costs nothing.

    Sums are taken over all ranks and micro-batches, so they do not depend on how a batch is distributed.
    """

    def __init__(self, asked: Logging, updates: Updates, order: Position) -> None:
        self._steps = frozenset(asked.module_steps)
        self._path = Path(asked.dir or ".").absolute() / FILE  # now: the script may change its directory later
        self._updates, self._order = updates, order
        self._window: _MeasuredWindow | None = None
        self._continues = False
        """Whether the file has steps of this training."""

    def on_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin with the first forward of a chosen step."""
        if self._order.begins_window:  # a new window; what is left was discarded
            self.on_close()
            if self._order.updates + 1 in self._steps:
                self._window = _MeasuredWindow(self._updates.model.module)
        if self._window is not None:
            self._window.forwarding = True

    def on_loss(self, loss: Tensor, num_items: int | Tensor) -> None:
        """The forward has ended; what runs from now on is recomputation."""
        if self._window is not None:
            self._window.forwarding = False

    @torch.no_grad()
    def on_gradients(self, finish: Callable[[], float]) -> None:
        """Take the norms of weights and of their gradients before the update. Collective.

        Args:
            finish: Finishes the gradients of the window and returns their divisor.
        """
        if self._window is None:
            return
        divisor, model = finish(), self._updates.model
        named = dict(model.module.named_parameters())
        weights = shard_norms({name: model.master_shard(parameter) for name, parameter in named.items()}, model.device)
        shards = {
            name: self._updates.grad_shard(parameter, create=False)
            for name, parameter in named.items()
            if parameter.requires_grad
        }
        norms = shard_norms({name: shard for name, shard in shards.items() if shard is not None}, model.device)
        self._window.divisor = divisor
        self._window.parameters = {
            name: (norm, norms[name] / divisor if name in norms else None) for name, norm in weights.items()
        }

    def on_step(self, step: Step) -> None:
        """Write the lines of a step that has ended. Collective."""
        if self._window is None:
            return
        rows = self._window.rows()
        self.on_close()
        if dist.get_rank() == 0:
            try:
                self._write(self._order.updates, rows)
            except OSError as error:
                _logger.warning("logging.module_steps: cannot write %s; the training goes on: %s", self._path, error)

    def on_load(self) -> None:
        """Keep the steps before that of the checkpoint."""
        self.on_close()
        self._continues = True

    def on_close(self) -> None:
        """Remove the hooks."""
        if self._window is not None:
            self._window.close()
            self._window = None

    def _write(self, step: int, rows: list[dict[str, Any]]) -> None:
        lines: list[str] = []
        if self._continues and self._path.is_file():
            recorded = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            lines = [line for line in recorded if _step_of(line) < step]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines += [json.dumps({"step": step} | {name: _finite(value) for name, value in row.items()}) for row in rows]
        self._path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self._continues = True


def _step_of(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def _finite(value: Any) -> Any:
    """A number, or None for those that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _MeasuredWindow:
    """The sums of one accumulation window on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self.forwarding = False
        self.divisor = 1.0
        self.parameters: Mapping[str, tuple[float, float | None]] = {}
        self._names = list(_seen(model))
        self._sums: dict[str, list[tuple[int, int, Tensor]]] = {"output": [], "gradient": []}
        """Of each tensor: index of the module, elements, and sum of squares and of values."""
        self._handles: list[Any] = []
        for index, name in enumerate(self._names):
            # The output is what all hooks make of it. Gradients are those of what the module itself returns: hooks of
            # the engine may return other tensors, through which not all of the gradient flows.
            register = model.get_submodule(name).register_forward_hook
            self._handles += [
                register(self._hook(index, self._watch), prepend=True),
                register(self._hook(index, self._measure)),
            ]

    def _hook(self, index: int, act: Callable[[int, Tensor], None]) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self.forwarding and module.training:
                for tensor in tensors_in(output):
                    if tensor.is_floating_point():
                        act(index, tensor)

        return torch.compiler.disable(after)  # type: ignore[no-untyped-call]

    def _watch(self, index: int, tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._add("gradient", index, gradient))  # type: ignore[no-untyped-call]

    def _measure(self, index: int, tensor: Tensor) -> None:
        self._add("output", index, tensor)

    @torch.no_grad()
    def _add(self, quantity: str, index: int, tensor: Tensor) -> None:
        values = tensor.detach()
        total = values.sum(dtype=torch.float64 if values.dtype == torch.float64 else torch.float32)
        self._sums[quantity].append(
            (index, values.numel(), torch.stack([norm_of(values).double().square(), total.double()]))
        )

    def rows(self) -> list[dict[str, Any]]:
        """The lines, modules in the order in which they end in the forward. Collective."""
        (outputs, after), (gradients, before) = map(self._summed, ("output", "gradient"))
        order = sorted((place, index) for index, place in enumerate(after) if place < math.inf)
        behind = sorted((place, index) for index, place in enumerate(before) if place < math.inf)
        places = {index: number for number, (_, index) in enumerate(behind, 1)}
        rows: list[dict[str, Any]] = []
        for _, index in order:
            row = {"module": self._names[index]} | _moments("output", outputs[index], 1.0)
            if index in places:
                row |= _moments("gradient", gradients[index], self.divisor * dist.get_world_size()) | {
                    "backward_order": places[index]
                }
            rows.append(row)
        for name, (norm, gradient) in self.parameters.items():
            rows.append(
                {"parameter": name, "weight_norm": norm} | ({} if gradient is None else {"gradient_norm": gradient})
            )
        return rows

    def _summed(self, quantity: str) -> tuple[list[list[float]], list[float]]:
        """Sum of squares, sum and number of elements of each module, and its place, over all ranks. Collective."""
        entries = self._sums[quantity]
        totals = torch.zeros(len(self._names), 3, dtype=torch.float64)
        places = torch.full((len(self._names),), math.inf, dtype=torch.float64)
        values = (
            torch.stack([sums for _, _, sums in entries]).cpu() if entries else torch.zeros(0, 2, dtype=torch.float64)
        )
        for place, ((index, count, _), sums) in enumerate(zip(entries, values, strict=True)):
            totals[index] += torch.tensor([*sums.tolist(), count], dtype=torch.float64)
            places[index] = min(places[index].item(), place)
        if dist.get_world_size() > 1:
            group = process_group.host_group()
            dist.all_reduce(totals, group=group)
            dist.all_reduce(places, dist.ReduceOp.MIN, group=group)
        return totals.tolist(), places.tolist()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self.forwarding = False


def _moments(name: str, sums: list[float], divisor: float) -> dict[str, float]:
    squares, total, count = sums
    return {
        f"{name}_rms": math.sqrt(squares / max(count, 1)) / divisor,
        f"{name}_mean": total / max(count, 1) / divisor,
    }


def _seen(model: nn.Module) -> Iterator[str]:
    """Every module once, without those that run in compiled code."""
    done: set[nn.Module] = set()

    def walk(module: nn.Module, name: str) -> Iterator[str]:
        if module in done:
            return
        done.add(module)
        if getattr(module, "_compiled_call_impl", None) is not None:  # its hooks are compiled too
            return
        yield name
        if not getattr(module.forward, "compiles", False) and not hasattr(module, "_orig_mod"):
            for child, inner in module.named_children():
                yield from walk(inner, f"{name}.{child}" if name else child)

    return walk(model, "")
