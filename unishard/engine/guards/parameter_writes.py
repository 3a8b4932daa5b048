"""Find parameters that the script or the forward writes past the engine.

Where a rank's tensors are shards or rounded copies, a write reaches some of them: FSDP2 trains one between two updates
and loses one in the forward, stage 3 of ZeRO ignores both, and stages 1 and 2 compute with a copy that the next update
replaces.

In-place operations raise the version of a tensor, which costs nothing to read: in every micro-batch. What bypasses
that, `parameter.data.fill_(1)` or `parameter.data = value`, shows in the bits and the memory, which are compared where
`Sampling` looks: of the parameters between two forwards, also of those that sharding has replaced and a list still
holds, and of what is gathered, or a rounded copy, around the forward of the module with which it comes.

Besides what begins between two looks, two kinds of writes through `data` are not found: those into the memory of a
gathered parameter outside that forward, and those to one that stage 3 of ZeRO has not gathered: it has no elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unishard.engine.guards.guard import Guard, Looks, WatchedModule
from unishard.engine.guards.tensor_marks import Mark, mark, versions
from unishard.engine.optim.stepping import replaced
from unishard.engine.place import LoopPlace
from unishard.errors import ContractError


class ParameterWrites(Guard):
    """Refuses what is written between two updates, and in a training forward.

    Without it: a weight that is initialized, clamped or averaged by hand is lost, or differs between engines.
    """

    def __init__(self, module: nn.Module, place: LoopPlace) -> None:
        """Remember the parameters after `prepare`, when the model's tensors are not its master weights.

        Args:
            module: The sharded model.
            place: Where the loop is.
        """
        self._place = place
        self._resting = dict(module.named_parameters())
        """The parameters while they are not gathered: FSDP2 then has other tensors in their place."""
        self.empty = {id(parameter): not parameter.numel() for parameter in self._resting.values()}
        """By the id of each of those whether it has no elements then."""
        self._former = replaced(module)
        self._names = [*self._resting]
        self._tensors: list[Tensor] = [*self._resting.values()]
        """Those, and what was gathered: FSDP2 keeps such tensors from one gathering to the next."""
        self._replaced: set[str] = set()
        """Parameters with other memory than before."""
        self._different: list[tuple[str, Tensor]] = []
        """Whether bits are others than before, by parameter, on the device."""
        self.parametrized: set[int] = set()
        """The ids of those that torch sets to themselves, as `torch.nn.utils.parametrize` does in the forward of LoRA
        on experts: their versions say nothing."""
        self.after_update()

    def after_update(self) -> None:
        """Remember the parameters until the next forward."""
        self._writes, self._versions = self._place.writes, versions(self._tensors)
        self._marks = self._at_rest() if self._place.looks_at_update else {}

    def before_forward(self) -> None:
        """Compare with what was kept.

        Raises:
            ContractError: The script has written a parameter.
        """
        if self._writes != self._place.writes:  # the engine itself
            self.after_update()
        if written := self._found():
            raise ContractError(
                f"{_named(written)} changed since {'the last update' if self._place.updates else 'unishard.prepare'}, "
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

    def _at_rest(self) -> dict[int, tuple[str, Mark]]:
        # What is empty at rest may be on its way to the next forward by now.
        marks = {
            id(each): (name, Mark(each) if self.empty[id(each)] else mark(each, memory=hasattr(each, "to_local")))
            for name, each in self._resting.items()
        }
        return marks | {id(each): (name, mark(each, memory=False)) for name, each in self._former.items()}

    def _found(self) -> list[str]:
        """What was written since this was called, in an order that is the same on all ranks."""
        before, self._versions = self._versions, versions(self._tensors)
        if self._marks and self._place.looks:
            marks, self._marks = self._marks, self._at_rest()
            for each in marks.keys() & self._marks.keys():
                self.compare(marks[each][0], marks[each][1], self._marks[each][1])
        written, self._replaced = self._replaced, set()
        if self._different:
            written |= _read(self._different)
            self._different = []
        if before != self._versions:
            changed = zip(self._names, self._tensors, before, self._versions, strict=True)
            written |= {name for name, each, was, now in changed if was != now and id(each) not in self.parametrized}
        if not written:
            return []
        self.after_update()
        return [name for name in self._resting if name in written]

    def add_gathered(self, name: str, tensor: Tensor) -> None:
        """Look from now on also at a tensor that was gathered."""
        self._names.append(name)
        self._tensors.append(tensor)
        self._versions += versions([tensor])

    def compare(self, name: str, was: Mark, now: Mark) -> None:
        """Note whether a parameter was written in between, whatever its version says."""
        if was.memory is not None and now.memory is not None and was.memory is not now.memory:
            self._replaced.add(name)
        elif was.bits is not None and now.bits is not None:
            self._different.append((name, was.bits != now.bits))


class GatheredWrites(Guard):
    """Looks at what is gathered, or a rounded copy, around the forward of the module with which it comes;
    `ParameterWrites` raises.

    Without it: a forward that writes `parameter.data` of a gathered parameter loses that in silence.
    """

    looks = Looks.CLOSELY

    def __init__(self, written: ParameterWrites) -> None:
        """Look at nothing yet.

        Args:
            written: Is told what each parameter was and what it is.
        """
        self._written = written
        self._running: dict[str, dict[str, Mark]] = {}
        """By module that runs what came with it."""
        self._there: set[int] = set()
        """The ids of all that."""
        self._seen: set[str] = set()
        """The names of what was gathered."""

    def forget(self) -> None:
        """Forget what a forward has left that ended in an error."""
        self._running, self._there = {}, set()

    def entered(self, part: WatchedModule, args: Any, kwargs: Any) -> None:
        """Remember what came with a module."""
        empty = self._written.empty
        marks = self._running[part.name] = {}
        for name, tensor in part.module.named_parameters(part.name):
            if ".parametrizations." in name:
                self._written.parametrized.add(id(tensor))
            own = name.rpartition(".")[0] == part.name
            # What is empty at rest is gathered by now if it is the module's own; others may be on their way.
            here = own if empty.get(id(tensor)) else id(tensor) not in empty
            if here and tensor.numel() and id(tensor) not in self._there:
                marks[name] = mark(tensor, memory=True)
        self._there.update(id(each.tensor) for each in marks.values())

    def left(self, part: WatchedModule, output: Any) -> None:
        """Compare with it, before it goes."""
        for name, was in self._running.pop(part.name, {}).items():
            self._there.discard(id(was.tensor))
            self._written.compare(name, was, mark(was.tensor, memory=True))
            if name not in self._seen:
                self._seen.add(name)
                self._written.add_gathered(name, was.tensor)


def _read(flags: list[tuple[str, Tensor]]) -> set[str]:
    """The names whose flags are set; waits for the device."""
    device = flags[0][1].device
    values = torch.stack([flag.to(device) for _, flag in flags]).tolist()
    return {name for (name, _), value in zip(flags, values, strict=True) if value}


def _named(written: list[str]) -> str:
    others = len(written) - 1
    return f"parameter {written[0]}" + (f" and {others} other{'s' if others > 1 else ''}" if others else "")
