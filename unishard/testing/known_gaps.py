"""How far an engine may deviate from plain torch, and where upstream limitations exceed that."""

from __future__ import annotations

from typing import NamedTuple

from unishard.contract.tolerances import Tolerance


class KnownGap(NamedTuple):
    """Cells in which an engine exceeds the common tolerance because of an upstream limitation, and their own
    tolerance.
    """

    backend: str
    model: str
    strategy: str
    precision: str
    tolerance: Tolerance
    link: str
    """The upstream issue or source."""


GAPS: tuple[KnownGap, ...] = ()
