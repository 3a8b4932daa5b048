"""AdamW whose moments have 8 bits, on shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unishard.distributed.layout import Layout
from unishard.distributed.shard_optimizer import ShardOptimizer
from unishard.distributed.shards import SteppedShard
from unishard.eight_bit.moments import MOMENTS, Moments8bit
from unishard.matrices.adamw import first_state, update


class _SharedBlocks(NamedTuple):
    """How an optimizer's parameters are sharded."""

    names: Mapping[int, Sequence[str]]
    """Of each group, by the identity of its dict: engines step some groups at a time."""
    layout: Mapping[str, Layout]
    rank: int
    stepped: Callable[[], Mapping[str, SteppedShard]]


class Update8bit(NamedTuple):
    """The update of one shard in a step."""

    name: str
    moments: Moments8bit
    """Whose `step` is that of this update."""
    stepped: SteppedShard
    options: Mapping[str, Any]

    def run(self, begin: int, end: int, codes: Mapping[str, Tensor] | None = None) -> None:
        """Update elements of the shard, whole blocks, whose codes may lie in other memory than those of the moments."""
        codes = self.moments.codes if codes is None else codes
        shard = _Stepped(self.stepped, begin, end, next(iter(codes.values())).device)
        self.moments.update(shard.weights, shard.gradient, self.options, begin, codes)
        shard.write()


def run_whole(updates: Sequence[Update8bit]) -> None:
    """Run updates one after the other."""
    for each in updates:
        each.run(0, each.moments.numel)


class AdamW8bit(ShardOptimizer):
    """bitsandbytes' AdamW8bit with the blocks of whole parameters, whatever an engine makes of these.

    State is kept by parameter and not in `state`: an engine may hold many parameters in one flat tensor, in whose
    blocks elements of several would lie. Small parameters have the state of torch's AdamW.
    """

    from_size: int
    """Elements from which on a parameter has moments of 8 bits."""
    full: frozenset[str]
    """Names of larger parameters that have moments of full precision, too."""
    moments: dict[str, Moments8bit]
    """Of the parameters of which this rank has elements, once they were updated."""
    small: dict[str, dict[str, Any]]
    """The same of small ones: the state of torch's AdamW."""
    codes_of: Callable[[str, str], Tensor] | None
    """Where the codes of a moment of a parameter lie, by their names, if not in memory of their own."""
    run: Callable[[Sequence[Update8bit]], None]
    """Runs the updates of a step: `run_whole`, or by pieces of those codes."""
    _sharing: _SharedBlocks | None

    def share(
        self,
        names: Sequence[Sequence[str]],
        layout: Mapping[str, Layout],
        rank: int,
        stepped: Callable[[], Mapping[str, SteppedShard]],
    ) -> None:
        """Step shards from now on; before that, `step` does nothing, which DeepSpeed calls while it is built.

        Args:
            names: Of the parameters in each group.
            layout: Which elements of each the ranks hold.
            rank: Which one this is.
            stepped: Called in a step: where it finds the shards of the parameters that it changes, by name.
        """
        groups = zip(self.param_groups, names, strict=True)
        self._sharing = _SharedBlocks({id(group): members for group, members in groups}, layout, rank, stepped)

    def is_small(self, name: str, numel: int) -> bool:
        """Whether a parameter of so many elements has the state of torch's AdamW; the same on all ranks."""
        return numel < self.from_size or name in self.full

    def first_state(self, options: Mapping[str, Any], tensor: Tensor) -> dict[str, Any]:
        """That of torch's AdamW: of moments of 8 bits, what they stand for is saved."""
        return first_state(tensor)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Not collective."""
        if self._sharing is not None:
            stepped, updates = self._sharing.stepped(), list[Update8bit]()
            for group in self.param_groups:
                updates += self._step_small(group, self._sharing, stepped)
            self.run(updates)

    def _step_small(
        self, group: Mapping[str, Any], sharing: _SharedBlocks, stepped: Mapping[str, SteppedShard]
    ) -> Iterator[Update8bit]:
        """Update small parameters; return the updates of the others."""
        small: list[tuple[_Stepped, dict[str, Any]]] = []
        for name in sharing.names[id(group)]:
            held = sharing.layout[name].of(sharing.rank)
            if not held or name not in stepped or stepped[name].tensor.grad is None:
                continue
            if self.is_small(name, sharing.layout[name].numel):
                shard = _Stepped(stepped[name], 0, len(held), stepped[name].tensor.device)
                small.append((shard, self.small_of(name, shard.weights)))
            else:
                moments = self.moments_of(name, held, stepped[name].tensor.device)
                moments.step += 1
                yield Update8bit(name, moments, stepped[name], group)
        if small:
            shards = [shard for shard, _ in small]
            states = [state for _, state in small]
            update([each.weights for each in shards], [each.gradient for each in shards], states, group)
            for shard in shards:
                shard.write()

    def held_8bit(self) -> Iterator[tuple[str, range]]:
        """The parameters with moments of 8 bits, and the elements of each that this rank has; of some it has."""
        assert self._sharing is not None
        for names in self._sharing.names.values():
            for name in names:
                layout = self._sharing.layout[name]
                if not self.is_small(name, layout.numel) and (held := layout.of(self._sharing.rank)):
                    yield name, held

    def moments_of(self, name: str, held: range, device: torch.device, step: int = 0) -> Moments8bit:
        """The moments of these elements of a parameter; new ones before its first update."""
        if name not in self.moments:
            codes = None if self.codes_of is None else {key: self.codes_of(name, key) for key in MOMENTS}
            self.moments[name] = Moments8bit(held, device, step, codes)
        return self.moments[name].to(device) if self.codes_of is None else self.moments[name]

    def small_of(self, name: str, weights: Tensor) -> dict[str, Any]:
        """The same of a small one."""
        if name not in self.small:
            self.small[name] = first_state(weights)
        return self.small[name]


class _Stepped:
    """Elements of this rank's shard of a parameter in one step, flat: the memory of the engine, or a copy of what is
    not contiguous or lies on another device.
    """

    def __init__(self, stepped: SteppedShard, begin: int, end: int, device: torch.device) -> None:
        own = slice(stepped.start + begin, stepped.start + end)
        assert stepped.tensor.grad is not None
        self._tensor = stepped.tensor.detach()
        self._flat = self._tensor.reshape(-1)
        self._own = self._flat[own]
        self.weights = self._own.to(device)
        self.gradient = stepped.tensor.grad.reshape(-1)[own].to(device, self.weights.dtype)

    def write(self) -> None:
        """Give the engine a copy's values."""
        if self.weights is not self._own:
            self._own.copy_(self.weights)
        if not self._tensor.is_contiguous():
            self._tensor.copy_(self._flat.view(self._tensor.shape))
