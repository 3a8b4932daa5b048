"""Where the engine's values are written: one file for each destination of `logging.to`, imported only if a config names
it.
"""

from __future__ import annotations
