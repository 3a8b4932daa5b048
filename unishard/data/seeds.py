"""Derives one seed from several numbers."""

from __future__ import annotations

import hashlib


def seed_of(*numbers: int) -> int:
    """A 63-bit seed that depends on every number and its position; a sum would give neighboring runs the same seeds."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
