"""Accelerators: memory, and bandwidth within and between nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import NamedTuple

from unishard.errors import ConfigError, Problem

GB, GIB = 10**9, 2**30


class Device(NamedTuple):
    """One accelerator in the usual server."""

    name: str
    """Empty where only its memory is known."""
    memory: int
    """Bytes that a process can allocate, about: after the CUDA context and NCCL's buffers."""
    within: float
    """Bytes a second that one accelerator sends to others of its node."""
    between: float
    """Bytes a second that one accelerator sends to other nodes, over its share of the node's network."""
    source: str = ""


def _device(name: str, gib: float, within: float, between: float, source: str) -> Device:
    return Device(name, int(gib * GIB), within * GB, between * GB, source)


_NVLINK = "NVIDIA's data sheet of the GPU: half of the NVLink figure, which counts both directions"
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _device("a100-40g", 38.4, 300, 25, f"{_NVLINK} (600 GB/s); DGX A100: one 200 Gb/s HDR port a GPU"),
        _device("a100-80g", 78.2, 300, 25, f"{_NVLINK} (600 GB/s); DGX A100: one 200 Gb/s HDR port a GPU"),
        _device("h100-80g", 78.1, 450, 50, f"{_NVLINK} (900 GB/s); DGX H100: one 400 Gb/s NDR port a GPU"),
        _device("h200-141g", 138.8, 450, 50, f"{_NVLINK} (900 GB/s); DGX H200: one 400 Gb/s NDR port a GPU"),
        _device("b200-180g", 176.6, 900, 50, f"{_NVLINK} (1800 GB/s); DGX B200: one 400 Gb/s NDR port a GPU"),
        _device("l40s-48g", 43.6, 32, 12.5, "no NVLink: PCIe 4.0 x16 (64 GB/s both directions); a 100 Gb/s port a GPU"),
        _device("rtx4090-24g", 23.1, 32, 1.25, "no NVLink: PCIe 4.0 x16 (64 GB/s both directions); 10 Gb/s Ethernet"),
    )
}
"""By the name of `--device`. Peak figures of the vendor; collectives reach 60 to 90 % of them for large messages."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": GB,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": GIB,
    "tib": 2**40,
    "g": GIB,
}


def device_named(name: str) -> Device:
    """Look up a device.

    Raises:
        ConfigError: There is none of this name.
    """
    if device := DEVICES.get(name.lower()):
        return device
    near = get_close_matches(name.lower(), DEVICES, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    problem = f"no device {name!r}; {hint}write one of {', '.join(DEVICES)}, or --memory 80GiB"
    raise ConfigError([Problem("--device", problem)])


def parse_bytes(text: str, option: str = "--memory") -> int:
    """Bytes in a text such as `80GiB` or `24 GB`.

    Raises:
        ConfigError: It is none; names the option.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS or not float(match[1]):
        raise ConfigError([Problem(option, f"{text!r} is no size; write a number and a unit, such as 80GiB or 24GB")])
    return int(float(match[1]) * _UNITS[match[2]])


def in_gib(nbytes: float) -> str:
    """GiB as a number; what is smaller than 0.1 GiB in MiB or KiB, with `M` or `K`."""
    for unit, size in (("", GIB), ("M", 2**20), ("K", 2**10)):
        if nbytes >= 0.0995 * size:
            value = nbytes / size
            return (
                f"{value:.0f}{unit}"
                if value >= 99.95
                else f"{value:.1f}{unit}"
                if value >= 9.995 or unit
                else f"{value:.2f}"
            )
    return f"{nbytes:.0f}B" if nbytes else "0"


def with_unit(nbytes: float) -> str:
    """The same with the unit written out, such as `71.9 GiB`."""
    number = in_gib(nbytes)
    unit = {"M": " MiB", "K": " KiB", "B": " B"}.get(number[-1], " GiB")
    return number.rstrip("MKB") + unit
