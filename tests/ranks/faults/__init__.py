"""Faults of one rank or one disk, by subject, with what comes of each: `make faults` plays them and writes
docs/reliability.md."""

from __future__ import annotations

from faults.calls import CALLS
from faults.disks import DISKS
from faults.ends import ENDS
from faults.errors import ERRORS
from faults.signals import SIGNALS

SUBJECTS = (ENDS, ERRORS, SIGNALS, CALLS, DISKS)
