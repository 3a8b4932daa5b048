"""Do not update unused parameters, as in plain torch and FSDP2; DeepSpeed treats a missing gradient as zero."""

from __future__ import annotations

import zlib
from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unishard.contract.private_api import PrivateApi
from unishard_deepspeed.masters.flat_master_weights import FlatMasterWeights
from unishard_deepspeed.private.zero_optimizer import ZeroOptimizer


class ArrivalOrder:
    """A hash of the order in which gradients come: equal on all ranks, or the ranks add up those of different
    parameters.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._known: dict[tuple[int, ...], bytes] = {}
        """By identities, what to hash: mostly one order in all backwards of a run."""
        self.hash = ""

    def add(self, arrived: Sequence[Tensor]) -> None:
        """Add the gradients of one backward."""
        if not self._numbers:
            return
        identities = tuple(map(id, arrived))
        if identities not in self._known:
            self._known = {
                identities: repr([self._numbers[each] for each in identities if each in self._numbers]).encode()
            }
        self.hash = f"{zlib.crc32(self._known[identities], int(self.hash or '0', 16)):08x}"

    def forget(self) -> None:
        """Reset at the end of a window."""
        self.hash = ""


class UnusedParameters:
    """Tracks which parameters get a gradient in an accumulation window, and keeps the optimizer from updating the
    others.

    The cost is a call of `set.add` per gradient. Where ranks may use different parameters, it is also an all-reduce of
    one byte per parameter in each update, which overlaps DeepSpeed's work until the optimizer steps; a rank reads the
    result only if it has not used all parameters itself. It uses private names only once a parameter is unused.
    """

    def __init__(
        self,
        zero: ZeroOptimizer,
        device: torch.device,
        missing: Sequence[PrivateApi] = (),
        ordered: Sequence[nn.Parameter] = (),
        *,
        alike: bool = False,
    ) -> None:
        """Register hooks.

        Args:
            zero: DeepSpeed's optimizer.
            device: Where this rank computes.
            missing: Patches that a window with an unused parameter needs, and whose private names DeepSpeed lacks.
            ordered: Parameters whose gradients are reduced together in the order in which they come.
            alike: Whether all ranks use the same parameters, which the engine compares; see `shared_parameters`.
        """
        self._zero, self._inner = zero, zero.inner
        self._missing = missing
        self._alike = alike and not missing
        self._early = bool(missing) or not zero.cases.unused.works
        """Whether waiting for the result may raise, which must not happen during DeepSpeed's step."""
        self.masters = FlatMasterWeights(self._inner.optimizer, zero.shards_of_masters, self._wait)
        self.used: set[Tensor] = set()
        """The parameters that have got a gradient in this window."""
        self._arrived: list[Tensor] = []
        """Those of the running backward, in the order in which they came."""
        self._order = ArrivalOrder(ordered)
        self._begun = self._gap = False
        self._found = False
        self._known = True
        self._reduction: Any = None
        self._flags = torch.empty(len(self._inner.trained) + 1, dtype=torch.uint8, device=device)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._arrived.append)  # type: ignore[no-untyped-call]
            for parameter in self._inner.trained
        ]

    @property
    def unused(self) -> Set[Tensor]:
        """The parameters that the coming update does not change, after `find`."""
        self._wait()
        return self.masters.unused

    def record_backward(self) -> None:
        """Note after each backward which gradients came, and after the first one of a window whether one is missing.

        DeepSpeed overwrites only the others.
        """
        self.used.update(self._arrived)
        self._order.add(self._arrived)
        self._arrived.clear()
        if not self._begun:
            self._begun, self._gap = True, self.is_gap

    @property
    def is_gap(self) -> bool:
        """Whether a parameter has got no gradient in this window."""
        return len(self.used) < len(self._inner.trained)

    @property
    def order(self) -> str:
        """A hash of the order in which the gradients of the window came; empty if it does not matter."""
        return self._order.hash

    def find(self) -> None:
        """Start to find the parameters that no rank has used, once at the end of a window. Collective unless the ranks
        are alike.

        Raises:
            BackendError: On every rank: a parameter is unused, and DeepSpeed lacks a private name for that.
        """
        if self._found:
            return
        complete = not self.is_gap
        # A rank that has used all knows the answer, and only takes part; the others wait for the device to learn it.
        self._found, self._known = True, complete and not self._missing
        if self._known:
            self.masters.unused = set()
        if self._alike:
            if not complete:
                self._conclude(self._used_here(), self._gap)
            return
        if complete and not self._gap:
            self._flags.fill_(1)
            self._flags[-1:].zero_()
        else:
            self._flags.copy_(torch.tensor([*self._used_here(), self._gap], dtype=torch.uint8))
        if dist.get_world_size() > 1:
            self._reduction = dist.all_reduce(self._flags, dist.ReduceOp.MAX, async_op=True)
        if self._early:
            self._wait()

    def _used_here(self) -> list[bool]:
        return [parameter in self.used for parameter in self._inner.trained]

    def _wait(self) -> None:
        """Wait for the result, once."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None
        if not self._known:
            *flags, gap = self._flags.tolist()
            self._conclude(flags, gap)

    def _conclude(self, flags: Sequence[bool], gap: bool) -> None:
        """Keep which parameters are unused, by a flag for each trained one that some rank has used."""
        self._known = True
        self.masters.unused = {
            parameter for parameter, used in zip(self._inner.trained, flags, strict=True) if not used
        }
        if self.masters.unused:
            self._zero.cases.unused.require()
        for patch in self._missing if gap or self.masters.unused else ():
            patch.require()

    def include(self, parameter: Tensor) -> None:
        """Update this parameter too, because the user set its gradient. Called after `find`."""
        self._wait()
        self.masters.unused.discard(parameter)

    def forget(self) -> None:
        """Reset at the end of a window."""
        self._wait()
        if self.masters.unused:  # a later update may create its optimizer state
            self._zero.link_states(now=False)
        self.used.clear()
        self._arrived.clear()
        self._order.forget()
        self._begun = self._gap = self._found = False

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self.masters.remove()
