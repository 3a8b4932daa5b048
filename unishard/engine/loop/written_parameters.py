"""Find parameters that the script or the forward writes past the engine.

Where a rank's tensors are shards or rounded copies, a write reaches some of them: FSDP2 trains one between two updates
and loses one in the forward, stage 3 of ZeRO ignores both, and stages 1 and 2 compute with a copy that the next update
replaces.

In-place operations raise the version of a tensor, which costs nothing to read: in every micro-batch. What bypasses
that, `parameter.data.fill_(1)` or `parameter.data = value`, shows in the bits and the memory, which are compared where
`Sampling` looks: of the parameters between two forwards, and of what a module computes with around its forward.

Besides what begins between two looks, two kinds of writes through `data` are not found: those into the memory of a
gathered parameter outside the forward of its own module, and those to one that stage 3 of ZeRO has not gathered: it has
no elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.forward_guard import ForwardGuard
from unishard.engine.loop.tensor_marks import memory_of, sum_of_bits, versions
from unishard.engine.model.compilation import eager_modules
from unishard.errors import ContractError


class _Mark(NamedTuple):
    """What a tensor is at one time; None where that is not compared."""

    tensor: Tensor
    version: int
    memory: torch.UntypedStorage | None = None
    bits: Tensor | None = None


class WrittenParameters(ForwardGuard):
    """Refuses what is written between two updates, and in a training forward."""

    def __init__(self, module: nn.Module, order: CallOrder) -> None:
        """Remember the parameters after `prepare`, when the model's tensors are not its master weights.

        Args:
            module: The sharded model.
            order: The engine's position in the loop.
        """
        self._module = module
        self._order = order
        self._parts = eager_modules(module)
        named = dict(module.named_parameters())
        self._names, self._resting = [*named], [*named.values()]
        """The parameters while they are not gathered: FSDP2 then has other tensors in their place."""
        self._empty = {id(parameter): not parameter.numel() for parameter in self._resting}
        """By the id of each of those whether it has no elements then."""
        self._running: dict[int, dict[str, _Mark]] = {}
        """What each module that runs computes with, while a forward is looked at."""
        self._gathered: dict[str, Tensor] = {}
        """What was gathered in such forwards; FSDP2 keeps those tensors from one gathering to the next."""
        self._gathered_versions: list[int] = []
        self._written: set[str] = set()
        self._different: list[tuple[str, Tensor]] = []
        self.keep()

    def keep(self) -> None:
        """Remember the parameters until the next forward; after each update."""
        self._writes, self._versions = self._order.writes, versions(self._resting)
        self._gathered_versions = versions([*self._gathered.values()])
        self._marks = self._at_rest() if self._order.looks_at_update else []

    def before_forward(self) -> None:
        """Compare with what was kept.

        Raises:
            ContractError: The script has written a parameter.
        """
        if self._writes != self._order.writes:  # the engine itself
            self.keep()
        if written := self._found():
            raise ContractError(
                f"{_named(written)} changed since {'the last update' if self._order.updates else 'unishard.prepare'}, "
                "but not by the engine, whose shards or rounded copies of the weights this would reach in part or not "
                f"at all; write the parameter with `with engine.weights.gathered([{written[0]!r}]) as weights:` or "
                "engine.weights.write, or before unishard.prepare"
            )

    def after_forward(self) -> None:
        """Compare with what was kept, and with what modules computed with.

        Raises:
            ContractError: The forward has written a parameter.
        """
        if written := self._found():
            raise ContractError(
                f"the forward writes {_named(written)}, of which it has only a shard, or a gathered or rounded copy, "
                "so the write is lost or differs between engines; write it after engine.step() with `with "
                f"engine.weights.gathered([{written[0]!r}]) as weights:`, for example to clamp a weight or to update a "
                "momentum encoder (engine.weights.average averages all weights); for an initialization that depends on "
                "data, run a batch through the model before unishard.prepare; a write that is the same on all ranks "
                "also works with sharding: no_shard and precision: fp32"
            )

    # -- the parameters at rest --------------------------------------------------------------------

    def _at_rest(self) -> list[_Mark]:
        # What is empty at rest may be on its way to the next forward by now.
        return [
            _Mark(each, versions([each])[0]) if self._empty[id(each)] else _mark(each, memory=hasattr(each, "to_local"))
            for each in self._resting
        ]

    def _found(self) -> list[str]:
        """What was written since this was called, in an order that is the same on all ranks."""
        before, self._versions = self._versions, versions(self._resting)
        if before != self._versions:
            changed = zip(self._names, before, self._versions, strict=True)
            self._written.update(name for name, was, now in changed if was != now)
        before, self._gathered_versions = self._gathered_versions, versions([*self._gathered.values()])
        if before != self._gathered_versions:  # longer where a module was looked at for the first time
            changed = zip(self._gathered, before, self._gathered_versions, strict=False)
            self._written.update(name for name, was, now in changed if was != now)
        if self._marks and self._order.looks:
            marks, self._marks = self._marks, self._at_rest()
            for name, was, now in zip(self._names, marks, self._marks, strict=True):
                self._compare(name, was, now)
        if self._different:
            self._written.update(_true(self._different))
            self._different = []
        if not self._written:
            return []
        written = [name for name in self._names if name in self._written]
        self._written = set()
        self.keep()
        return written

    def _compare(self, name: str, was: _Mark, now: _Mark) -> None:
        replaced = was.memory is not None and now.memory is not None and was.memory is not now.memory
        if was.version != now.version or replaced:
            self._written.add(name)
        elif was.bits is not None and now.bits is not None:
            self._different.append((name, was.bits != now.bits))

    # -- what modules compute with -----------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The block that runs a forward that is looked at."""
        hooks = [hook for name, part in self._parts.items() for hook in self._around(name, part)]
        try:
            yield
        finally:
            self._running = {}
            for hook in hooks:
                hook.remove()

    def _around(self, name: str, part: nn.Module) -> Iterator[RemovableHandle]:
        """Register hooks between those of the engine, which gather and release."""
        yield part.register_forward_pre_hook(lambda module, args: self._enter(name, module))
        yield part.register_forward_hook(lambda module, args, output: self._leave(module), prepend=True)

    def _enter(self, prefix: str, module: nn.Module) -> None:
        marks = self._running[id(module)] = {}
        for name, tensor in module.named_parameters(prefix):
            own = name.rpartition(".")[0] == prefix
            # What is empty at rest is gathered by now if it is the module's own; others may be on their way.
            if tensor.numel() and (own if self._empty.get(id(tensor)) else id(tensor) not in self._empty):
                marks[name] = _mark(tensor, memory=True, bits=own or not prefix)

    def _leave(self, module: nn.Module) -> None:
        for name, was in self._running.pop(id(module), {}).items():
            self._compare(name, was, _mark(was.tensor, memory=True, bits=was.bits is not None))
            self._gathered.setdefault(name, was.tensor)


def _mark(tensor: Tensor, *, memory: bool, bits: bool = True) -> _Mark:
    return _Mark(
        tensor,
        versions([tensor])[0],
        memory_of(tensor) if memory else None,
        sum_of_bits(tensor) if bits else None,
    )


def _true(flags: Sequence[tuple[str, Tensor]]) -> Iterator[str]:
    """The names whose flags are set; waits for the device."""
    device = flags[0][1].device
    values = torch.stack([flag.to(device) for _, flag in flags]).tolist()
    return (name for (name, _), value in zip(flags, values, strict=True) if value)


def _named(written: list[str]) -> str:
    others = len(written) - 1
    return f"parameter {written[0]}" + (f" and {others} other{'s' if others > 1 else ''}" if others else "")
