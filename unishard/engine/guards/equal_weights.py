"""Compare the weights between the ranks, where each holds all of them in full and a script may write them.

Their bits are added up on the device before updates whose calls are compared, and read behind the backward. Elsewhere
writing a weight is an error (`parameter_writes`).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unishard.distributed import agreement
from unishard.distributed.host_read import HostRead
from unishard.engine.guards.guard import Guard
from unishard.engine.guards.tensor_marks import sum_of_bits
from unishard.engine.place import LoopPlace
from unishard.failures.collective_check import samples
from unishard.failures.compared_call import ComparedCall

_PARTS = 64
"""Parts of the weights that are compared one by one; with so many parameters or less, each is a part."""


class EqualWeights(Guard):
    """Adds a checksum of each part of the weights to updates whose calls are compared.

    Without it: a weight that is written on one rank only lets the ranks train different models.
    """

    def __init__(self, module: nn.Module, place: LoopPlace) -> None:
        """Start after `prepare`.

        Args:
            module: The prepared model.
            place: Where the loop is.
        """
        self._own = dict(module.named_parameters())
        self._place = place
        self._bits: HostRead | None = None

    def before_forward(self) -> None:
        """Add up the bits before the first forward of such an update."""
        if not self._place.micro_batch and samples(self._place.updates):
            self._bits = HostRead(_added_up([*self._own.values()]))

    def before_step(self, call: ComparedCall) -> None:
        """Add the checksums."""
        if not call.last or self._bits is None:
            return
        bits, self._bits = self._bits, None
        names = [*self._own]
        parts = [names[part] for part in _parts(len(names))]
        told = [part[0] if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]
        call.held |= {
            name: f"with the checksum {total % 2**32:08x}" for name, total in zip(told, bits.all(), strict=True)
        }


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


def computes_alike(device: torch.device) -> bool:
    """Whether all ranks compute the same bits from the same numbers: on one kind of processor, with as many threads.

    Collective.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return agreement.equal((name, torch.get_num_threads(), torch.__version__))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next((line for line in lines if line.startswith("model name")), platform.processor())
    except OSError:
        return platform.processor()
