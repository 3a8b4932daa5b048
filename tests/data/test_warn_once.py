"""Which line a warning of the engine shows."""

from __future__ import annotations

import warnings
from typing import Any

from unishard.data.warn_once import WarnOnce

WITHIN = """
from contextlib import contextmanager

@contextmanager
def forward(warn):
    warn("the same batches")
    yield
"""


def test_a_warning_inside_a_with_block_shows_the_line_of_the_loop() -> None:
    module: dict[str, Any] = {"__name__": "unishard.engine.guards.another"}
    exec(WITHIN, module)
    warn = WarnOnce()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with module["forward"](warn):
                pass
    assert [(each.filename, str(each.message)) for each in caught] == [(__file__, "the same batches")]
