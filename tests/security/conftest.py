"""Lets the sweep lay out files as the tests of formats and checkpoints do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("formats", "checkpoint", "checkpoint/formats")]
