"""The calls that the ranks compare."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from unishard.config import Communication
from unishard.engine.place import LoopPlace
from unishard.failures import collective_check
from unishard.failures.compared_call import ComparedCall


class RankCalls:
    """Refuses calls that differ between ranks."""

    def __init__(self, module: nn.Module, device: torch.device, place: LoopPlace, communication: Communication) -> None:
        """Join the check of the ranks. Collective.

        Args:
            module: The model.
            device: Where this rank computes.
            place: Where the loop is.
            communication: How calls are compared.
        """
        self._module, self._device, self._place = module, device, place
        self._member = collective_check.join(communication)
        self.compared = self._member is not None
        """Whether there are other ranks to compare with."""
        self._trained = module.training
        self._began, self._seconds = time.monotonic(), 0.0
        """When the current window began, and what the last one took."""
        self._slowest = 0.0
        """What the window before the last check took, on the slowest rank."""
        self._checks_all = self._checks_ends = True
        """Whether all calls of the current update are checked, and whether where it begins and its step."""

    def check_sampled(self, call: str, detail: str = "") -> None:
        """`compare` a call that has no more than a name, and what must be the same on all ranks, in words."""
        self.compare(ComparedCall(call, detail))

    def compare(self, call: ComparedCall) -> None:
        """Check that all ranks make the same call. Collective.

        Before the call's collectives in the first updates, in long ones, and in those that the guards look at; also
        where a tenth update begins, before it is made, and where the model has changed between training and evaluation.
        Else together with the next call that is checked.

        Raises:
            RankMismatchError: They do not; names each rank's call.
        """
        if self._member is None:
            return
        changed, self._trained = self._trained is not self._module.training, self._module.training
        if changed or self._checks_all or (self._checks_ends and (call.name == "step" or self._place.begins_window)):
            self._slowest = self._member.check_now(call, str(self._place), self._seconds)
        else:
            self._member.record(call, str(self._place))

    def check_now(self, call: str, detail: str = "") -> None:
        """Check a call before its collectives, in every update. Collective.

        Raises:
            RankMismatchError: They do not; names each rank's call.
        """
        if self._member is not None:
            self._slowest = self._member.check_now(ComparedCall(call, detail), str(self._place), self._seconds)

    def enter_module(self, name: str) -> None:
        """Check that the forward enters the same module on all ranks: in the first updates before its parameters are
        gathered. Collective.

        Raises:
            RankMismatchError: The ranks enter different modules; names them.
        """
        if self._member is not None:
            self._member.enter_module(
                name, wait=self._module.training and collective_check.samples_modules(self._place.updates)
            )

    def awaiting(self) -> AbstractContextManager[None]:
        """A block with device collectives whose result the host reads, in the block or later."""
        return nullcontext() if self._member is None else self._member.reading(self._device)

    def end_window(self) -> None:
        """Choose the calls of the coming update that are checked."""
        updates = self._place.updates
        self._checks_all = self._place.looks_at_update or collective_check.samples_all(updates, self._slowest)
        self._checks_ends = collective_check.samples(updates)
        self._began, before = time.monotonic(), self._began
        self._seconds = self._began - before

    def leave(self, why: BaseException | None) -> None:
        """Tell the other ranks that this engine is closed."""
        if self._member is not None:
            self._member.leave(why)
