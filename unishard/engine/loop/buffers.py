"""Buffers that each rank changes by its own data, such as BatchNorm's running statistics: made equal where they are
read.

Neither FSDP2 nor DeepSpeed does anything about them after the start; DistributedDataParallel by default sends rank 0's
before each forward (`forward_sync_buffers`), which unishard switches off. So the same is done here around every engine.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.checkpoint.export.sources import persistent_buffers
from unishard.checkpoint.hashing import hash_of
from unishard.contract.adapter import ShardedModel
from unishard.distributed import agreement
from unishard.distributed.broadcast import broadcast, reduce, wide
from unishard.distributed.shards import flat
from unishard.engine.loop.call_order import CallOrder
from unishard.errors import ConfigError, Problem

_FIELD = "training.buffers"
_STATISTICS = re.compile(r"(^|\.)running_(mean|var)$")
"""Running statistics of normalizing layers, of which a mean is right."""

_logger = logging.getLogger("unishard")


class Merged(NamedTuple):
    """The buffers of all ranks together, by their first names."""

    values: dict[str, Tensor]
    """New tensors: rank 0's of what is left to each rank."""
    own: dict[str, Tensor]
    """This rank's buffers, of those that may differ between ranks."""
    bases: dict[str, Tensor]
    """Those that are summed, after the last merge."""


class Buffers:
    """The persistent buffers of a model: those that a checkpoint has.

    The others are caches, which each rank fills for itself.
    """

    def __init__(self, how: str | Mapping[str, str], adapter: ShardedModel, order: CallOrder) -> None:
        """Check the patterns.

        Raises:
            ConfigError: One matches no buffer, or buffers that cannot be merged like that.
        """
        self._how = how
        self._adapter = adapter
        self._order = order
        self._reported = False
        self.stale = False
        """Whether a forward in training mode may have changed them since they were equal."""
        if not isinstance(how, str) and (problems := list(_problems(how, self._held()))):
            raise ConfigError([Problem(_FIELD, problem) for problem in problems])
        self.begin()

    def begin(self) -> None:
        """Count what is summed from here: the buffers are equal on all ranks."""
        self._bases = {name: each.detach().clone() for name, each in self._held().items() if self._way(name) == "sum"}

    def resume(self, own: Mapping[str, Tensor], bases: Mapping[str, Tensor]) -> None:
        """Go on with this rank's buffers of a checkpoint, after those that all ranks have.

        Args:
            own: As in `Merged`; none where another number of ranks saved it.
            bases: As in `Merged`.
        """
        self.begin()
        held = self._held()
        for live, saved in ((held, own), (self._bases, bases)):
            for name, values in saved.items():
                if name in live and live[name].shape == values.shape:
                    live[name].data.copy_(values)
        self.stale = bool(own)

    def equalize(self, call: str) -> None:
        """Make the buffers that differ between ranks equal on all of them, as `training.buffers` says. Collective.

        Costs one small all-reduce of hashes, and nothing for a model without persistent buffers.

        Args:
            call: The engine's method that does it.

        Raises:
            RankMismatchError: Another rank made another call.
        """
        self.stale = False
        if self._how == "local":
            return
        held = self._held()
        for name, values in self.merged(call).values.items():
            if self._way(name) != "local":
                # `data`: BatchNorm's backward does not read the running statistics, but autograd counts writes to them.
                held[name].data.copy_(values)
        self.begin()

    @torch.no_grad()
    def merged(self, call: str) -> Merged:
        """Merge the buffers that differ between ranks, and change none. Collective.

        Args:
            call: As in `equalize`.
        """
        held = self._held()
        if dist.get_world_size() == 1 or not held:
            return Merged({}, {}, {})
        self._order.ranks.check_now(call, ", buffers")
        with self._order.ranks.awaiting():
            different = {*_different(held), *self._bases}
            self._report(different)
            values = {name: _copy(held[name]) for name in held if name in different}
            for name, base in self._bases.items():
                values[name] = values[name].to(wide(base.dtype)) - base
            for how in ("mean", "sum", "min", "max"):
                reduce(self._of(how, values), how)
            broadcast([*self._of("rank0", values), *self._of("local", values)])
            for name, base in self._bases.items():
                values[name] = (base + values[name]).to(base.dtype)
        return Merged(values, {name: held[name] for name in held if name in different}, self._bases)

    def equalize_for_evaluation(self, call: str) -> None:
        """The same before a forward in evaluation mode, if there was one in training mode. Collective."""
        if self.stale and not self._adapter.module.training:
            self.equalize(call)

    def _held(self) -> dict[str, Tensor]:
        """The persistent buffers, each once."""
        named = persistent_buffers(self._adapter.module)
        first: dict[int, str] = {}
        for name, buffer in named.items():
            first.setdefault(id(buffer), name)
        return {name: named[name] for name in first.values()}

    def _way(self, name: str) -> str:
        if isinstance(self._how, str) and self._how != "sync":
            return self._how
        asked = {} if isinstance(self._how, str) else self._how
        default = "mean" if self._adapter.module.get_buffer(name).is_floating_point() else "rank0"
        return next((how for pattern, how in asked.items() if re.search(pattern, name)), default)

    def _of(self, how: str, values: Mapping[str, Tensor]) -> list[Tensor]:
        return [each for name, each in values.items() if self._way(name) == how]

    def _report(self, different: Iterable[str]) -> None:
        """Say once how buffers are merged of which nobody said it, other than running statistics."""
        asked = () if isinstance(self._how, str) else self._how
        guessed = sorted(
            name
            for name in different
            if not (_STATISTICS.search(name) or any(re.search(pattern, name) for pattern in asked))
        )
        if not guessed or self._reported or self._how in ("rank0", "local"):
            return
        self._reported = True
        if dist.get_rank() == 0:
            _logger.warning(
                "%s: buffers that differ between ranks are merged for evaluation and in checkpoints: %s; if that is "
                "wrong, say how, such as %s: {%s: max}",
                *(_FIELD, ", ".join(f"{name} ({self._way(name)})" for name in guessed[:5]), _FIELD, guessed[0]),
            )


def _problems(how: Mapping[str, str], held: Mapping[str, Tensor]) -> Iterable[str]:
    for pattern, way in how.items():
        matched = {name: each for name, each in held.items() if re.search(pattern, name)}
        if not matched:
            some = ", ".join([*held][:3])
            yield f"{pattern!r} matches no persistent buffer; " + (
                f"write part of a name, such as {some}" if held else "the model has none, remove it"
            )
        for name, buffer in matched.items():
            if way == "mean" and not buffer.is_floating_point():
                yield f"{name} is {buffer.dtype}, of which there is no mean; choose sum, min, max, rank0 or local"
            elif way in ("sum", "min", "max") and (
                buffer.is_complex() or (way == "sum" and buffer.dtype == torch.bool)
            ):
                yield f"{name} is {buffer.dtype}, of which there is no {way}; choose rank0 or local"


def _copy(buffer: Tensor) -> Tensor:
    return flat(buffer).clone().view(buffer.shape)


def _different(buffers: Mapping[str, Tensor]) -> list[str]:
    """Names of those of which the ranks hold different bits, the same on every rank. Collective."""
    names, hashes = [*buffers], [hash_of(buffer) for buffer in buffers.values()]
    differing = agreement.differing([value - 2**64 if value >> 63 else value for value in hashes])
    return [names[place] for place in differing]
