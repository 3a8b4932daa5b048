"""What a config makes of a run, decided once: a frozen part for each part of the run, which gets nothing else.

Where a section of the config is all that its owner needs, it is the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unishard.config import Logging, Profile

__all__ = ["ConfigText", "ObserveSpec"]


@dataclass(frozen=True, slots=True)
class ConfigText:
    """The config as plain data, to be written down."""

    fields: Mapping[str, Any]
    """Each field by its dotted path."""
    given: Mapping[str, Any]
    """The sections with what a file or a script has set."""
    saved: Mapping[str, Any]
    """All sections but `launch`, as JSON, for the manifest of a checkpoint."""


@dataclass(frozen=True, slots=True)
class ObserveSpec:
    """What is measured and traced, and where it goes."""

    logging: Logging
    profile: Profile
    total_steps: int | None
    """Optimizer steps of the training, if that is known."""
    compute: str
    """`precision.compute`, in which a device has its peak."""
    text: ConfigText
