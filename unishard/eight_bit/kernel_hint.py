"""bitsandbytes' hint at a faster kernel of 4-bit products on some CPUs, which each rank would print."""

from __future__ import annotations

import logging


def hide_kernel_hint() -> None:
    """Import bitsandbytes 0.50 without the hint (backends/cpu/ops.py), after this was called."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
