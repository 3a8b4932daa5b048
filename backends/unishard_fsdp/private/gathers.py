"""End gathers that no forward has waited for: FSDP2 would use what they hold in the next one (torch 2.13,
_fsdp_param_group.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unishard_fsdp.private.groups import groups_of


def end_gathers(modules: Iterable[Any]) -> None:
    """Gather modules that were prefetched, and did not run."""
    for group in groups_of(modules):
        group.wait_for_unshard()
