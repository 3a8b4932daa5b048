"""What an update uses and a script may write past the engine: options of the optimizer, and weights.

It must be the same on all ranks.

Where each rank holds all weights in full, writing them is allowed: their bits are added up on the device before updates
whose calls are compared, and read behind the backward. Elsewhere it is an error (`written_parameters`).
"""

from __future__ import annotations

import json
import platform
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unishard.distributed import host_numbers
from unishard.distributed.host_read import HostRead
from unishard.engine.loop.call_order import CallOrder
from unishard.engine.loop.tensor_marks import sum_of_bits
from unishard.failures.collective_check import samples

_PARTS = 64
"""Parts of the weights that are compared one by one; with so many parameters or less, each is a part."""


class EqualValues:
    """Describes these values in updates whose calls are compared."""

    def __init__(self, module: nn.Module, order: CallOrder, device: torch.device, *, full: bool) -> None:
        """Start after `prepare`. Collective.

        Args:
            module: The prepared model.
            order: The engine's position in the loop.
            device: Where this rank computes.
            full: Whether the module's parameters are the weights, in full on every rank.
        """
        self._own = dict(module.named_parameters())
        self._order = order
        self._adds_up = full and _same_everywhere(device)
        self._bits: HostRead | None = None

    def look(self) -> None:
        """Add up the bits of the weights before the first forward of an update whose calls are compared."""
        if self._adds_up and samples(self._order.updates):
            self._bits = HostRead(_added_up([*self._own.values()]))

    def text(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """The values, as `Call.held`; none in an update whose calls are not compared.

        Args:
            groups: Those of the optimizer.
        """
        if not samples(self._order.updates):
            return ""
        values = _options(groups)
        bits, self._bits = self._bits, None
        if bits is not None:
            names = [*self._own]
            parts = [names[part] for part in _parts(len(names))]
            told = [part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]
            values |= {
                name: f"with the checksum {total % 2**32:08x}" for name, total in zip(told, bits.all(), strict=True)
            }
        return json.dumps(values)


def _parts(number: int) -> list[slice]:
    """At most `_PARTS` slices of so many items."""
    size = max(1, -(-number // _PARTS))
    return [slice(begin, begin + size) for begin in range(0, number, size)]


@torch.no_grad()
def _added_up(parameters: Sequence[Tensor]) -> Tensor:
    """The bits of each part, on the device."""
    device = parameters[0].device
    sums = [
        torch.zeros((), dtype=torch.int64, device=device) if each is None else each.to(device, torch.int64)
        for each in map(sum_of_bits, parameters)
    ]
    return torch.stack([torch.stack(sums[part]).sum() for part in _parts(len(sums))])


def _same_everywhere(device: torch.device) -> bool:
    """Whether all ranks compute the same bits from the same numbers: on one kind of processor, with as many threads.

    Collective.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    kind = zlib.crc32(f"{name}, {torch.get_num_threads()}, {torch.__version__}".encode())
    high, low = host_numbers.largest([kind, -kind])
    return high == -low


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next((line for line in lines if line.startswith("model name")), platform.processor())
    except OSError:
        return platform.processor()


def _options(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The options by name: one value where all groups have the same, else a list."""
    options: dict[str, list[Any]] = {}
    for group in groups:
        for name, value in group.items():
            if name != "params" and (plain := _plain(value)) is not None:
                options.setdefault(name, []).append(plain)
    return {
        name: str(values[0] if all(value == values[0] for value in values) else values)
        for name, values in options.items()
    }


def _plain(value: Any) -> Any:
    """A number, or a tuple of numbers; None for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return tuple(value) if value and all(isinstance(each, int | float) for each in value) else None
    return value if isinstance(value, int | float) else None
