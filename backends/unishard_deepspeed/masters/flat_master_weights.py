"""Let a torch optimizer update only the shards of ZeRO's flat master weights whose parameters have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unishard.contract.optimizer_state import memory_for

Shards = Mapping[Tensor, Mapping[nn.Parameter, range]]
"""Where the shards of parameters lie in each flat master weight."""


class FlatMasterWeights:
    """Replaces a flat master weight during `optimizer.step` by views of the shards to update.

    A flat master weight has one step count and one set of moments, so the optimizer can only update all of it. It is
    split when for the first time only some of its parameters are to be updated, and stays split: each shard then has
    its own step count, and moments that are views of the flat ones, where DeepSpeed still finds them. A flat master
    weight that is always updated completely, or not at all, is never split and costs nothing.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        find: Callable[[], Shards],
        settle: Callable[[], None],
    ) -> None:
        """Register hooks on an optimizer.

        Args:
            optimizer: Its groups hold the flat master weights while it steps.
            find: Returns the shards of each flat master weight; padding is in no shard. Called at the first unused
                parameter.
            settle: Called before the optimizer steps; `unused` must be known afterwards.
        """
        self.unused: set[Tensor] = set()
        """Parameters that the next step does not update."""
        self._optimizer = optimizer
        self._find = find
        self._wait = settle
        self._split: dict[Tensor, dict[nn.Parameter, Tensor]] = {}
        self._stepping: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

    @cached_property
    def shards(self) -> Shards:
        """The shards of each flat master weight on this rank."""
        return self._find()

    @cached_property
    def masters(self) -> Mapping[nn.Parameter, Tensor]:
        """The flat master weight of each parameter that this rank holds some of."""
        return {parameter: master for master, shards in self.shards.items() for parameter in shards}

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def stepped_tensor(self, parameter: nn.Parameter) -> tuple[Tensor, int]:
        """The tensor that the optimizer steps (the flat master weight or a view of it), and the start of a parameter's
        shard in it.
        """
        master = self.masters[parameter]
        if master in self._split:
            return self._split[master][parameter], 0
        return master, self.shards[master][parameter].start

    def stepping(self) -> list[Tensor]:
        """Inside a step: the master weights that it steps, all or in part."""
        if self._stepping:
            return [master for _, masters in self._stepping for master in masters]
        return [master for group in self._optimizer.param_groups for master in group["params"]]

    def forget(self) -> None:
        """Clear all state; no flat master weight is split afterwards."""
        self._split.clear()
        self._optimizer.state.clear()

    def split(self, master: Tensor) -> Mapping[nn.Parameter, Tensor]:
        """Give each shard its own state from now on; returns views of the shards."""
        self._split[master] = {parameter: self._view(master, own) for parameter, own in self.shards[master].items()}
        return self._split[master]

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._wait()
        if not self.unused and not self._split:
            return
        for group in optimizer.param_groups:
            self._stepping.append((group, group["params"]))
            group["params"] = [tensor for master in group["params"] for tensor in self._tensors_to_step(master)]

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group, masters in self._stepping:
            group["params"] = masters
            for master in masters:
                self.gather_state(master)
        self._stepping.clear()

    def _tensors_to_step(self, master: Tensor) -> list[Tensor]:
        shards = self.shards.get(master, {})
        staying = shards.keys() & self.unused
        if shards and len(staying) == len(shards):
            return []
        if staying and master not in self._split:
            self.split(master)
        if master not in self._split:
            return [master]
        moving = {each: view for each, view in self._split[master].items() if each not in staying}
        for parameter, view in moving.items():
            view.grad = None if master.grad is None else _part(master.grad, shards[parameter])
        return [*moving.values()]

    def _view(self, master: Tensor, own: range) -> Tensor:
        """A view of a shard, with the state that it had in the flat master weight."""
        view = _part(master.detach(), own)
        for key, value in self._optimizer.state.get(master, {}).items():
            if not isinstance(value, Tensor):
                self._optimizer.state[view][key] = value
            elif value.shape == master.shape:
                self._optimizer.state[view][key] = _part(value, own)
            else:
                self._optimizer.state[view][key] = value.clone()
        return view

    def gather_state(self, master: Tensor) -> None:
        """Move state that the step created for single shards into flat tensors, and make it views of those."""
        for parameter, view in self._split.get(master, {}).items():
            view.grad = None
            flat = self._optimizer.state[master]
            for key, value in self._optimizer.state.get(view, {}).items():
                if not isinstance(value, Tensor) or value.shape != view.shape:
                    flat[key] = value  # such as a step count, of which the flat state has none
                    continue
                if key not in flat:
                    flat[key] = memory_for(self._optimizer, key, master, value.dtype)
                interval = _part(flat[key], self.shards[master][parameter])
                if interval.data_ptr() != value.data_ptr():
                    self._optimizer.state[view][key] = interval.copy_(value)


def _part(values: Tensor, own: range) -> Tensor:
    return values.narrow(0, own.start, len(own))
