"""AdamW whose moments have 8 bits, on shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unishard.distributed.layout import Layout
from unishard.distributed.shard_optimizer import ShardOptimizer
from unishard.distributed.shards import SteppedShard
from unishard.eight_bit.moments import Moments8bit
from unishard.matrices.adamw import first_state, update


class _SharedBlocks(NamedTuple):
    """How an optimizer's parameters are sharded."""

    names: Mapping[int, Sequence[str]]
    """Of each group, by the identity of its dict: engines step some groups at a time."""
    layout: Mapping[str, Layout]
    rank: int
    stepped: Callable[[], Mapping[str, SteppedShard]]


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
            stepped = self._sharing.stepped()
            for group in self.param_groups:
                self._step_group(group, self._sharing, stepped)

    def _step_group(
        self, group: Mapping[str, Any], sharing: _SharedBlocks, stepped: Mapping[str, SteppedShard]
    ) -> None:
        small: list[tuple[_Stepped, dict[str, Any]]] = []
        for name in sharing.names[id(group)]:
            held = sharing.layout[name].of(sharing.rank)
            if not held or name not in stepped or stepped[name].tensor.grad is None:
                continue
            shard = _Stepped(stepped[name], len(held))
            if self.is_small(name, sharing.layout[name].numel):
                small.append((shard, self.small_of(name, shard.weights)))
            else:
                device = shard.weights.device
                self.moments_of(name, held, device).to(device).update(shard.weights, shard.gradient, group)
                shard.write()
        if small:
            shards = [shard for shard, _ in small]
            states = [state for _, state in small]
            update([each.weights for each in shards], [each.gradient for each in shards], states, group)
            for shard in shards:
                shard.write()

    def moments_of(self, name: str, held: range, device: torch.device) -> Moments8bit:
        """The moments of these elements of a parameter; new ones before its first update."""
        if name not in self.moments:
            self.moments[name] = Moments8bit(held, device)
        return self.moments[name]

    def small_of(self, name: str, weights: Tensor) -> dict[str, Any]:
        """The same of a small one."""
        if name not in self.small:
            self.small[name] = first_state(weights)
        return self.small[name]


class _Stepped:
    """This rank's shard of a parameter in one step, flat: the memory of the engine, or a copy of what is not
    contiguous.
    """

    def __init__(self, stepped: SteppedShard, numel: int) -> None:
        tensor = stepped.tensor.detach()
        assert stepped.tensor.grad is not None
        end = stepped.start + numel
        self._tensor = tensor
        self.weights = tensor.reshape(-1)[stepped.start : end]
        self.gradient = stepped.tensor.grad.reshape(-1)[stepped.start : end].to(tensor.dtype)

    def write(self) -> None:
        """Give the engine a copy's values."""
        if not self._tensor.is_contiguous():
            self._tensor.copy_(self.weights.view(self._tensor.shape))
