"""Checks the accelerators that torch can use, and the environment variables about them."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unishard.tools.doctor.check import Check, Status
from unishard.tools.doctor.imports import one_line, quietly

_DRIVER = Path("/proc/driver/nvidia/version")


def driver() -> str | None:
    """Version of this machine's NVIDIA driver; None if there is none."""
    try:
        text = _DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return match[0] if (match := re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)) else "of unknown version"


def devices() -> Iterator[Check]:
    """Check the accelerators, and the environment variables about them. Imports torch."""
    torch = import_module("torch")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield _accelerators(torch, count, [str(one.message).splitlines()[0] for one in caught])
    yield from (_device(torch, index) for index in range(count))
    if "DS_ACCELERATOR" in os.environ and find_spec("deepspeed"):
        yield _exported(os.environ["DS_ACCELERATOR"], "cuda" if count else "cpu")


def _accelerators(torch: Any, count: int, warned: list[str]) -> Check:
    build, here = torch.version.cuda or getattr(torch.version, "hip", None), driver()
    details = {"count": count, "cuda": torch.version.cuda, "driver": here}
    of = f"torch built for CUDA {torch.version.cuda}, driver {here or 'unknown'}"
    if count:
        return Check("accelerators", Status.OK, f"{count}; {of}" if torch.version.cuda else str(count), details=details)
    if here and not build:
        why = f"none: this torch is a CPU build, but the machine has an NVIDIA driver ({here})"
        return Check(
            "accelerators",
            Status.WARN,
            why,
            "install a CUDA build of torch (https://pytorch.org/get-started/locally)",
            details,
        )
    if here:
        why = f"none: {of}" + (f"; torch says: {warned[0]}" if warned else "")
        instead = "update the driver or install a torch built for an older CUDA; look at CUDA_VISIBLE_DEVICES"
        return Check("accelerators", Status.WARN, why, instead, details)
    return Check("accelerators", Status.OK, "none; trains on the CPU", details=details)


def _device(torch: Any, index: int) -> Check:
    """Check a device by a sum: fails if torch has no kernels for it, or if another process uses it exclusively."""
    name = f"device cuda:{index}"
    try:
        with quietly():
            model = torch.cuda.get_device_name(index)
            torch.ones(8, device=f"cuda:{index}").sum().item()
    except Exception as error:  # torch raises RuntimeError and its subclasses, drivers raise others
        built = ", ".join(torch.cuda.get_arch_list())
        return Check(
            name, Status.FAIL, f"cannot compute: {one_line(error)}", f"install a torch built for it (this one: {built})"
        )
    return Check(name, Status.OK, model, details={"name": model})


def _exported(value: str, right: str) -> Check:
    """Check DS_ACCELERATOR, which DeepSpeed trusts over what torch finds."""
    if value == right:
        return Check("DS_ACCELERATOR", Status.OK, value)
    return Check(
        "DS_ACCELERATOR", Status.FAIL, f"exported as {value!r}, but torch computes on {right}", "unset DS_ACCELERATOR"
    )
