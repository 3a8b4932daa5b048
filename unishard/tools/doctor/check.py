"""The result of one check."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any


class Status(StrEnum):
    """Severity of a result."""

    OK = "ok"
    """Nothing to do."""
    WARN = "warn"
    """Training works, but something is untested, missing, or will be refused."""
    FAIL = "fail"
    """Training does not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    """What was checked: `torch`, `backend fsdp`, `probe fsdp ddp-buckets`, `accelerators`."""
    status: Status
    found: str
    """The result."""
    instead: str = ""
    """What to do about it, as an imperative; empty if nothing."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """The data behind the line, for programs; JSON values."""


# -- Imports an engine without its output, and reports why if it cannot be imported ----------------


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress what engines print, log and warn about while they are imported: stdout is only for the report."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def failure(package: str) -> str:
    """Why a package cannot be imported, in one line; empty if it can."""
    try:
        with quietly():
            import_module(package)
    except (
        Exception
    ) as error:  # a broken installation can raise anything: ImportError, OSError, RuntimeError, AttributeError
        return one_line(error)
    return ""


def one_line(error: BaseException) -> str:
    """An exception's class and the first line of its message."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
