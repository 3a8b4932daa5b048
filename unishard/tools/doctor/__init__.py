"""The checks of `unishard doctor`: whether this environment can train, and what to do if not.

Importing it needs no torch.
"""

from __future__ import annotations

from unishard.tools.doctor.check import Check, Status
from unishard.tools.doctor.examination import connected, examine, place, worst
from unishard.tools.doctor.summary import is_probe, summary

__all__ = ["Check", "Status", "connected", "examine", "is_probe", "place", "summary", "worst"]
