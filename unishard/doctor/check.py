"""One thing that was looked at, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["Check", "Status"]


class Status(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    """Nothing to do."""
    WARN = "warn"
    """Training runs, but something was not tested, is not there, or will be refused."""
    FAIL = "fail"
    """Keeps training from running."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    """What was looked at: `torch`, `backend fsdp`, `probe fsdp ddp-buckets`, `accelerators`."""
    status: Status
    found: str
    """What it is like."""
    instead: str = ""
    """What to do about it, as an imperative; empty where there is nothing to do."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """For programs: what the line is made of. Values that JSON can hold."""
