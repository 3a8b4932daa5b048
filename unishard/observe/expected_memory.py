"""What an engine was expected to hold: compared with what it holds, and shown beside an out-of-memory error."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property

import torch

from unishard.config import Config
from unishard.config.topology import Topology
from unishard.contract.backend import Backend
from unishard.contract.footprint import Footprint, ModelShape
from unishard.contract.results import Placement
from unishard.errors import ConfigError
from unishard.observe.observer import Observer

__all__ = ["ExpectedMemory"]

_logger = logging.getLogger("unishard")

_HOST = "can't allocate memory"
"""In torch 2.13's error of the CPU allocator (c10/core/impl/alloc_cpu.cpp); it has no class of its own."""

_STRONGER = ("shard_optimizer", "shard_grad_op", "full_shard")


class ExpectedMemory(Observer):
    """Notes the plan on an out-of-memory error. Costs nothing until then."""

    def __init__(self, backend: Backend, shape: ModelShape, cfg: Config, topology: Topology) -> None:
        """Hold what a footprint is computed from.

        Args:
            backend: The engine.
            shape: The model before it was sharded.
            cfg: What runs.
            topology: The ranks, and this one.
        """
        self._backend, self._shape, self._cfg, self._topology = backend, shape, cfg, topology

    def on_error(self, error: BaseException) -> None:
        """Add the note to an out-of-memory error."""
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _HOST in str(error)):
            try:
                error.add_note(self.note())
            except Exception:  # the error of the run must reach the user, whatever the plan says
                _logger.debug("the plan of this run cannot be computed", exc_info=True)

    @cached_property
    def _footprint(self) -> Footprint:
        return self._backend.footprint(self._shape, self._cfg, self._topology)

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
        said = [
            f"parameters {planned.parameters.total:,} bytes planned, {placement.param_bytes:,} held without padding"
        ]
        if device.type == "cuda":
            state = planned.persistent.device - planned.optimizer.device
            said.append(
                f"{state:,} bytes of state planned on the device, {torch.cuda.memory_allocated(device):,} allocated"
            )
        _logger.debug("rank %d: %s", self._topology.rank, "; ".join(said))

    def sent_bytes(self) -> int:
        """What this rank sends to others in an optimizer step; 0 if it cannot be planned."""
        try:
            return sum(each.sent() for each in self._footprint.traffic)
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
        """Bytes on the device beside the persistent ones; 0 where the allocator does not tell."""
        if not torch.cuda.is_available():
            return 0
        return max(0, torch.cuda.max_memory_allocated() - self._footprint.persistent.device)

    def _changes(self, activations: int) -> Iterator[tuple[int, str]]:
        """Changes of the config and the bytes that they save, activations by rule of thumb."""
        cfg, training = self._cfg, self._cfg.training
        if cfg.activation_checkpointing == "none":
            yield activations * 3 // 4, "unishard set CFG activation_checkpointing=full"
        if training.micro_batch_size > 1 and training.micro_batch_size % 2 == 0:
            sizes = f"micro_batch_size={training.micro_batch_size // 2}"
            windows = f"gradient_accumulation_steps={2 * training.gradient_accumulation_steps}"
            yield activations // 2, f"unishard set CFG training.{sizes} training.{windows}"
        strategy, now = cfg.sharding.within_group, _most(self._footprint)
        after = _STRONGER[_STRONGER.index(strategy) + 1 :] if strategy in _STRONGER else _STRONGER
        alternatives = [f"sharding.strategy={name}" for name in after if not cfg.sharding.hybrid]
        if cfg.offload.optimizer == "none" and strategy != "no_shard":
            alternatives.append("offload.optimizer=cpu")
        for change in alternatives:
            try:
                other = self._backend.footprint(self._shape, cfg.override(change), self._topology)
            except ConfigError:
                continue
            if (saved := now - _most(other)) > 0:
                yield saved, f"unishard set CFG {change}"


def _most(footprint: Footprint) -> int:
    return footprint.persistent.device + max([footprint.step, *footprint.forward, *footprint.backward])


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"
