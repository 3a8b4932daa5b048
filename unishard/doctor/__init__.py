"""What `unishard doctor` looks at: whether this environment can train, and what to do where it cannot. Imports without torch."""

from __future__ import annotations

from unishard.doctor.check import Check, Status
from unishard.doctor.examination import examine, worst

__all__ = ["Check", "Status", "examine", "worst"]
