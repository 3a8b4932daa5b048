"""A CUDA device for the CPU build of torch: `import torch` installs it where DEVICE_SIM=1 and the built extension is on
the path.

DEVICE_SIM=1             the switch; CUDA_VISIBLE_DEVICES="" leaves torch without a device, as on a machine with one
DEVICE_SIM_DEVICES=2     devices of this machine
DEVICE_SIM_PATIENCE=50   milliseconds that work may be late while nobody waits for it; 0: none is late
"""

from __future__ import annotations

import atexit
import importlib.util
import os
from typing import Any

__all__ = ["autoload", "device"]

device: Any = None
"""The extension, where it is installed."""


def autoload() -> None:
    """Called by torch at the end of its import (entry point `torch.backends`)."""
    if os.environ.get("DEVICE_SIM") == "1" and visible():
        install()


def visible() -> list[int]:
    """The devices of this machine that this process may see, as CUDA reads CUDA_VISIBLE_DEVICES: up to the first that
    is not there."""
    count = int(os.environ.get("DEVICE_SIM_DEVICES", "2"))
    found = []
    for name in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(","):
        if not name.strip().isdecimal() or int(name) >= count:
            break
        found.append(int(name))
    return found


def install() -> None:
    """Load the extension and put it in the place of what torch's CUDA build has."""
    global device
    from simulated_cuda import building, distributed, torch_cuda

    path = building.folder() / f"{building.NAME}.so"
    spec = importlib.util.spec_from_file_location(building.NAME, path)
    assert spec is not None
    assert spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    if not device.install(len(visible()), int(os.environ.get("DEVICE_SIM_PATIENCE", "50"))):
        raise RuntimeError("torch does not take the hooks of the simulated device")
    torch_cuda.install(device, visible)
    distributed.install(device)
    atexit.register(device.end_streams)
