"""What an engine was expected to hold: compared with what it holds, and shown beside an out-of-memory error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property

import torch
import torch.distributed as dist

from unishard.contract.footprint import Footprint
from unishard.contract.plan import MemorySpec
from unishard.contract.results import Placement, Step
from unishard.errors import ConfigError
from unishard.observe.observer import Observer

_logger = logging.getLogger("unishard")

_HOST = "can't allocate memory"
"""In torch 2.13's error of the CPU allocator (c10/core/impl/alloc_cpu.cpp); it has no class of its own."""


class ExpectedMemory(Observer):
    """Notes the plan on an out-of-memory error. Costs nothing until then."""

    def __init__(self, planned: MemorySpec) -> None:
        self._planned = planned
        self._updated = False

    def on_step(self, step: Step) -> None:
        """The optimizer state is there from now on."""
        self._updated = True

    def on_error(self, error: BaseException) -> None:
        """Add the note to an out-of-memory error."""
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _HOST in str(error)):
            try:
                error.add_note(self.note())
            except Exception:  # the error of the run must reach the user, whatever the plan says
                _logger.debug("the plan of this run cannot be computed", exc_info=True)

    @cached_property
    def _footprint(self) -> Footprint:
        return self._planned.footprint()

    def compare(self, placement: Placement, device: torch.device) -> None:
        """Log what was planned beside what is held, at level DEBUG. Not collective.

        Args:
            placement: What the engine holds.
            device: Where it is.
        """
        if not _logger.isEnabledFor(logging.DEBUG):
            return
        try:
            planned = self._footprint
        except ConfigError:  # a pattern of an optimizer section that is not used here
            return
        messages = [
            f"parameters {planned.parameters.total:,} bytes planned, {placement.param_bytes:,} held without padding"
        ]
        if device.type == "cuda":
            state = planned.persistent.device - planned.optimizer.device
            messages.append(
                f"{state:,} bytes of state planned on the device, {torch.cuda.memory_allocated(device):,} allocated"
            )
        _logger.debug("rank %d: %s", dist.get_rank(), "; ".join(messages))

    def sent_bytes(self) -> int:
        """What this rank sends to others in an optimizer step; 0 if it cannot be planned."""
        try:
            return sum(transfer.sent() for transfer in self._footprint.traffic)
        except Exception:  # a figure for the log must not end a run
            _logger.debug("the traffic of this run cannot be planned", exc_info=True)
            return 0

    def note(self) -> str:
        """The plan of this rank, and the two changes that would help most."""
        planned = self._footprint
        lines = ["unishard planned for this rank, on the device:"]
        lines += [f"  {name:<16} {_gib(size.device)}" for name, size in planned.parts.items() if size.device]
        if planned.gathered:
            lines.append(f"  {'gathered':<16} {_gib(planned.gathered)}")
        activations = self._activations()
        if activations:
            lines.append(f"  and what the activations of this micro-batch take, {_gib(activations)} so far")
        changes = sorted(self._changes(activations), reverse=True)[:2]
        if changes:
            lines.append("what would help most:")
            lines += [f"  {change}" + (f"  saves about {_gib(saved)}" if saved else "") for saved, change in changes]
        lines.append("unishard plan CFG --model MODEL shows every engine and strategy")
        return "\n".join(lines)

    def _activations(self) -> int:
        """Bytes on the device beside the persistent ones; 0 if the allocator does not count them."""
        if not torch.cuda.is_available():
            return 0
        state_bytes = self._footprint.persistent.device
        if not self._updated:
            state_bytes -= self._footprint.optimizer.device
        return max(0, torch.cuda.max_memory_allocated() - state_bytes)

    def _changes(self, activations: int) -> Iterator[tuple[int, str]]:
        """Changes of the config and the bytes that they save, activations by rule of thumb."""
        for change, part in self._planned.of_activations.items():
            yield int(activations * part), f"--set {change}"
        now = _most(self._footprint)
        for change in self._planned.of_state:
            try:
                other = self._planned.footprint(change)
            except ConfigError:
                continue
            if (saved := now - _most(other)) > 0:
                yield saved, f"--set {change}"


def _most(footprint: Footprint) -> int:
    return footprint.persistent.device + max(footprint.step, footprint.forward.most, footprint.backward.most)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"
