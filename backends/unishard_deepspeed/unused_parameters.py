"""Leaves parameters as they are that an update does not use, as plain torch and FSDP2 do; DeepSpeed counts a missing gradient as zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unishard.config import Config
from unishard.patches import Patch
from unishard_deepspeed.flat_master_weights import FlatMasterWeights, FlatShard
from unishard_deepspeed.inner_optimizer import InnerOptimizer
from unishard_deepspeed.patches import PATCHES
from unishard_deepspeed.patches.master_weights import link_states_again, pieces_of_masters
from unishard_deepspeed.patches.optimizer_kind import kind_of, require

__all__ = ["UnusedParameters"]


class UnusedParameters:
    """Watches which parameters get a gradient in an accumulation window, and keeps the optimizer from moving the others.

    Costs a call of `set.add` for each gradient, and in each update one all-reduce of a byte for each parameter, which goes on beside
    DeepSpeed's own work until the optimizer steps. While every parameter is used, no private name is.
    """

    def __init__(self, cfg: Config, optimizer: Any, inner: InnerOptimizer, device: torch.device, broken: Sequence[Patch] = ()) -> None:
        """Watch an engine.

        Args:
            cfg: What runs.
            optimizer: DeepSpeed's.
            inner: The torch optimizer in it.
            device: Where this rank computes.
            broken: What a window needs that leaves a parameter out in a micro-batch, and DeepSpeed has not.
        """
        self._kind = kind_of(cfg)
        self._optimizer = optimizer
        self._inner = inner
        self._broken = broken
        patch = PATCHES.get(f"unused-{self._kind}")
        self._early = bool(broken) or not (patch is None or patch.works)
        """Whether the answer may be an error, which is not for the middle of DeepSpeed's step."""
        self.masters = FlatMasterWeights(inner.optimizer, self._pieces, self._settle)
        self._used: set[Tensor] = set()
        self._begun = self._gap = False
        self._found = False
        self._settled = True
        self._reduction: Any = None
        self._flags = torch.empty(len(inner.trained) + 1, dtype=torch.uint8, device=device)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]
            for parameter in inner.trained
        ]

    def _pieces(self) -> Mapping[Tensor, Sequence[FlatShard]]:
        return pieces_of_masters(self._optimizer, self._inner, self._kind)

    @property
    def left_out(self) -> Set[Tensor]:
        """After `find`: what the coming update does not move."""
        self._settle()
        return self.masters.left_out

    def note(self) -> None:
        """After each backward: in the first of a window, DeepSpeed overwrites the gradients that came."""
        if not self._begun:
            self._begun, self._gap = True, len(self._used) < len(self._inner.trained)

    def find(self) -> None:
        """At the end of a window, once: begin to find the parameters that no rank has used in it. Collective.

        Raises:
            BackendError: On every rank: DeepSpeed has not the names for a window that leaves a parameter out, as this one does.
        """
        if self._found:
            return
        self._found, self._settled = True, False
        self._flags.copy_(torch.tensor([*(parameter in self._used for parameter in self._inner.trained), self._gap], dtype=torch.uint8))
        if dist.get_world_size() > 1:
            self._reduction = dist.all_reduce(self._flags, dist.ReduceOp.MAX, async_op=True)
        if self._early:
            self._settle()

    def _settle(self) -> None:
        """Wait for the answer, once."""
        if self._settled:
            return
        self._settled = True
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None
        *flags, gap = self._flags.tolist()
        self.masters.left_out = {parameter for parameter, used in zip(self._inner.trained, flags, strict=True) if not used}
        if self.masters.left_out:
            require("unused", self._kind)
        for patch in self._broken if gap or self.masters.left_out else ():
            patch.require()

    def take_up(self, parameter: Tensor) -> None:
        """After `find`: the update moves this one too, because it has been given a gradient."""
        self._settle()
        self.masters.left_out.discard(parameter)

    def forget(self) -> None:
        """The window is over."""
        self._settle()
        if self.masters.left_out:  # it may get its first optimizer state in a later update
            link_states_again(self._optimizer, self._kind)
        self._used.clear()
        self._begun = self._gap = self._found = False

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self.masters.remove()
