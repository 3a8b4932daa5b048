"""The result of one check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
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
