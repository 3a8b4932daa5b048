"""Find parameters that the script or the forward writes past the engine.

Where a rank's tensors are shards or rounded copies, a write reaches some of them: FSDP2 trains one between two updates
and loses one in the forward, stage 3 of ZeRO ignores both, and stages 1 and 2 compute with a copy that the next update
replaces.

In-place operations on a parameter raise its version, which costs nothing to read. What bypasses that, such as
`parameter.data.fill_(1)`, shows in the bits, which are added up on the device in the first updates. Under ZeRO-3 it
leaves no trace in the forward of a module around that which holds the parameter, or in a hook before the forward of the
latter: DeepSpeed gathers the parameter for the read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unishard.engine.loop.call_order import CallOrder
from unishard.engine.model.compilation import eager_modules
from unishard.errors import ContractError

_FIRST = 3
"""The updates in which bits are compared, in the first forward of each: there a habit shows, and the host waits for the
device."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


class _Mark(NamedTuple):
    """What a parameter was; None where that is not compared."""

    version: int
    storage: Any
    """Only where it has no memory of its own, as for a DTensor: there `parameter.data = value` leaves no other
    trace."""
    bits: Tensor | None


class WrittenParameters:
    """Refuses what is written between two updates, and in a training forward."""

    def __init__(self, module: nn.Module, units: Iterable[nn.Module]) -> None:
        """Register hooks before the engine does: FSDP2 then gathers before them and releases after, and hooks of the
        user run between.

        Args:
            module: The model, not sharded yet.
            units: The modules whose parameters will be gathered together.
        """
        self._module = module
        self._units = set(units)
        units_by_name = {name: part for name, part in module.named_modules() if part in self._units}
        self._in_units = {
            f"{name}.{inner}" for name, unit in units_by_name.items() for inner, _ in unit.named_parameters()
        }
        self._eager = eager_modules(module)
        # Of a module with several names the first, as of its parameters.
        self._parts = {part: prefix for prefix, part in reversed([*self._modules(module)])}
        self._order: CallOrder
        self._own: dict[str, nn.Parameter] = {}
        """The parameters while they are not gathered: their names stay, and FSDP2 puts other tensors in their place."""
        self._kept: dict[str, _Mark] = {}
        self._writes = 0
        self._gathered: dict[str, tuple[nn.Parameter, _Mark]] = {}
        """FSDP2's gathered tensors, whose versions only the forward can change."""
        self._marks: dict[nn.Module, dict[str, tuple[nn.Parameter, _Mark]]] = {part: {} for part in self._parts}
        """Of each module that runs what is gathered."""
        self._found: _Comparison | None = None
        """While a forward runs that is looked at closely."""
        self._inner = [hook for part in self._parts for hook in self._inside(part)]

    def begin(self, order: CallOrder) -> None:
        """Remember the parameters after `prepare`, when the model's tensors are not its master weights.

        Args:
            order: The engine's position in the loop.
        """
        self._order = order
        self._own = dict(self._module.named_parameters())
        self.keep()

    def keep(self) -> None:
        """Remember the parameters until the next forward; after `prepare`, and after an update before one that is
        looked at.
        """
        self._writes = self._order.writes
        self._kept = _marks(self._own, bits=self._order.updates < _FIRST)

    def close(self) -> None:
        """Forget all."""
        self._kept, self._gathered = {}, {}
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        while self._inner:
            self._inner.pop().remove()

    def before_forward(self) -> None:
        """Compare with what was kept.

        Raises:
            ContractError: The script has written a parameter.
        """
        found = _Comparison()
        now = _marks(self._own, bits=self._order.updates < _FIRST)
        by_engine = self._writes != self._order.writes
        replaced = self._order.gathered or by_engine
        for name, mark in now.items():
            was = self._kept.get(name)
            if was is not None and not by_engine:
                found.add(name, was._replace(storage=None) if was.bits is None and replaced else was, mark)
            if mark.bits is None and replaced:
                now[name] = mark._replace(storage=None)
        self._kept = now
        if written := found.names(self._own):
            self._kept = {}
            raise ContractError(
                f"{_named(written)} changed since {'the last update' if self._order.updates else 'unishard.prepare'}, "
                "but not by the engine, whose shards or rounded copies of the weights this would reach in part or not "
                f"at all; write the parameter with `with engine.gathered([{written[0]!r}]) as weights:` or "
                "engine.set_parameter, or before unishard.prepare"
            )

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The block that runs a training forward.

        Raises:
            ContractError: The forward has written a parameter.
        """
        found, closely = _Comparison(), self._order.updates < _FIRST
        if not closely:
            self._remove_hooks()
        outer = [hook for part in self._parts for hook in self._outside(part, found)] if closely else []
        self._found = found if closely else None
        self._order.gathered = True  # a resumed run may begin past the updates whose hooks would say so
        try:
            yield
        finally:
            self._found = None
            for hook in outer:
                hook.remove()
            for marks in self._marks.values():
                marks.clear()
        self._end(found)

    def _end(self, found: _Comparison) -> None:
        now = _marks(self._own, bits=self._order.updates < _FIRST)
        for name, was in self._kept.items():
            found.add(name, was if was.bits is not None else was._replace(storage=None), now[name])
        for name, (parameter, was) in self._gathered.items():
            found.add(name, was, _mark(parameter, bits=False))
        self._kept = {}
        if written := found.names(self._own):
            raise ContractError(
                f"the forward writes {_named(written)}, of which it has only a shard, or a gathered or rounded copy, "
                "so the write is lost or differs between engines; write it after engine.step() with `with "
                f"engine.gathered([{written[0]!r}]) as weights:`, for example to clamp a weight or to update a "
                "momentum encoder (engine.ema averages all weights); for an initialization that depends on data, run "
                "a batch through the model before unishard.prepare; a write that is the same on all ranks also works "
                "with sharding: no_shard and precision: fp32"
            )

    def _modules(self, module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """The modules that may be gathered one by one; none inside a unit, nor inside a compiled module, which would
        compile again.
        """
        yield prefix, module
        if module not in self._units:
            for name, child in module.named_children():
                if child in self._eager:
                    yield from self._modules(child, f"{prefix}{name}.")

    def _held(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """What is gathered with a module: all of a unit; of another module its own parameters, and of the root all
        outside units.
        """
        prefix = self._parts[module]
        for name, parameter in ((prefix + name, parameter) for name, parameter in module.named_parameters()):
            own = self._own.get(name)
            # Not the other elements that ZeRO-3 shows: they may be on their way.
            copied = not prefix and parameter is not own and name not in self._in_units
            # A tensor in place of a parameter is that of a `functional_call`.
            if (
                own is not None
                and isinstance(parameter, nn.Parameter)
                and (module in self._units or "." not in name[len(prefix) :] or copied)
            ):
                yield name, parameter

    def _outside(self, watched: nn.Module, found: _Comparison) -> list[RemovableHandle]:
        """Register hooks before and after those of the engine that gather.

        ZeRO-3's are the last that it finds, FSDP2's the first.
        """

        def before(module: nn.Module, args: Any) -> None:
            for name, parameter in self._held(watched):
                was = self._kept.get(name)
                if was is not None and was.bits is None and parameter is self._own[name] and not parameter.numel():
                    # Gathering ahead replaces storages outside units, and gathering at all those inside.
                    found.add(
                        name,
                        was if watched in self._units else was._replace(storage=None),
                        _mark(parameter, bits=False),
                    )
                    self._kept[name] = was._replace(storage=None)

        return [
            watched.register_forward_pre_hook(before, prepend=True),
            watched.register_forward_pre_hook(lambda module, args: self._mark_gathered(watched, self._held(watched))),
        ]

    def _inside(self, watched: nn.Module) -> list[RemovableHandle]:
        """Register hooks around those of the user."""

        def gathered(module: nn.Module, args: Any) -> None:
            if module is watched:  # not a copy of it
                self._order.gathered = True
                # Not what ZeRO-3 shows: it may be on its way.
                self._mark_gathered(
                    watched, (each for each in self._held(watched) if each[1] is not self._own.get(each[0]))
                )

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if module is watched:
                self._compare_gathered(watched)

        return [watched.register_forward_pre_hook(gathered, prepend=True), watched.register_forward_hook(after)]

    def _mark_gathered(self, watched: nn.Module, held: Iterable[tuple[str, nn.Parameter]]) -> None:
        if self._found is None:
            return
        marks = self._marks[watched]
        for name, parameter in held:
            if (
                name in self._kept
                and name not in marks
                and (parameter is not self._own[name] or self._kept[name].bits is None)
            ):
                marks[name] = parameter, _mark(parameter, bits=True)

    def _compare_gathered(self, watched: nn.Module) -> None:
        if self._found is None:
            return
        marks = self._marks[watched]
        for name, (parameter, was) in marks.items():
            self._found.add(name, was, _mark(parameter, bits=was.bits is not None))
            if parameter is not self._own[name]:
                self._gathered[name] = parameter, was._replace(storage=None, bits=None)
        marks.clear()


class _Comparison:
    """Collects what differs, and asks the device once."""

    def __init__(self) -> None:
        self._found: set[str] = set()
        self._bits: dict[str, Tensor] = {}

    def add(self, name: str, was: _Mark, now: _Mark) -> None:
        """Compare what both marks have."""
        if was.version != now.version or (was.storage is not None and was.storage is not now.storage):
            self._found.add(name)
        elif was.bits is not None and now.bits is not None:
            different = was.bits != now.bits
            self._bits[name] = self._bits[name] | different if name in self._bits else different

    def names(self, order: Iterable[str]) -> list[str]:
        """The parameters that were written, in an order that is the same on all ranks.

        Waits for the device if bits are compared.
        """
        if self._bits:
            first = next(iter(self._bits.values()))
            flags = torch.stack([flag.to(first.device) for flag in self._bits.values()]).tolist()
            self._found.update(name for name, flag in zip(self._bits, flags, strict=True) if flag)
        return [name for name in order if name in self._found]


def _marks(parameters: Mapping[str, nn.Parameter], *, bits: bool) -> dict[str, _Mark]:
    return {name: _mark(parameter, bits=bits) for name, parameter in parameters.items()}


@torch.no_grad()
def _mark(parameter: Any, *, bits: bool) -> _Mark:
    without_memory = hasattr(parameter, "to_local") or not parameter.numel()
    return _Mark(
        parameter._version,
        parameter.untyped_storage() if without_memory else None,
        sum_of_bits(parameter) if bits else None,
    )


def sum_of_bits(parameter: Any) -> Tensor | None:
    """Of this rank's shard: exact, whatever the values; None if it has no elements."""
    local: Tensor = parameter.detach()
    local = local.to_local() if hasattr(local, "to_local") else local
    local = torch.view_as_real(local) if local.is_complex() else local
    bits = local.view(_INTEGERS[local.itemsize])
    return (
        bits.sum(dtype=bits.dtype) if local.numel() else None
    )  # it may wrap; in a wider dtype torch would copy all of it on the CPU


def _named(written: list[str]) -> str:
    others = len(written) - 1
    return f"parameter {written[0]}" + (f" and {others} other{'s' if others > 1 else ''}" if others else "")
