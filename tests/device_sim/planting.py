"""Removes one wait from code that has it, to see whether the simulated device notices."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch

WAITS: dict[str, tuple[Any, str]] = {
    "Stream.wait_event": (torch.cuda.Stream, "wait_event"),
    "Stream.wait_stream": (torch.cuda.Stream, "wait_stream"),
    "Stream.synchronize": (torch.cuda.Stream, "synchronize"),
    "Event.synchronize": (torch.cuda.Event, "synchronize"),
    "Tensor.record_stream": (torch.Tensor, "record_stream"),
    "cuda.synchronize": (torch.cuda, "synchronize"),
}


@contextmanager
def without(wait: str, file: str, *functions: str) -> Iterator[list[str]]:
    """Skip a wait where it is called from a file, or only from some functions of it.

    Yields:
        The places where it was skipped.
    """
    owner, name = WAITS[wait]
    real, skipped = getattr(owner, name), []

    def skipping(*given: Any, **named: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_filename.endswith(file) and (not functions or caller.f_code.co_name in functions):
            skipped.append(f"{file}:{caller.f_lineno}")
            return None
        return real(*given, **named)

    with mock.patch.object(owner, name, skipping):
        yield skipped


def _settle() -> None:
    """Leave nothing behind: what an error has kept alive, and what is still queued."""
    gc.collect()
    for _ in range(2):  # the first one may raise what was late
        with suppress(RuntimeError):
            torch.cuda.synchronize()


def noticed(scenario: Any, *arguments: Any) -> str:
    """What the device says of a scenario; nothing if it finds no race. An engine may hide an error, so its list counts
    too."""
    from simulated_cuda import device

    before = len(device.races())
    unexpected = os.environ.pop("DEVICE_SIM_RACES", None)
    try:
        scenario(*arguments)
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "race on the simulated device" not in str(error):
            raise
    finally:
        _settle()
        if unexpected is not None:
            os.environ["DEVICE_SIM_RACES"] = unexpected
    return "\n".join(device.races()[before:])
