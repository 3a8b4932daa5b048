"""Stage 3: prevent that modules free the parameters that they have gathered or found gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def not_freed(parameters: Sequence[Any]) -> Iterator[None]:
    """A block in which modules do not free these parameters.

    DeepSpeed frees a parameter after the forward and the backward of each module that has it, unless it is `external`:
    used outside its module (runtime/zero/partitioned_param_coordinator.py, release_sub_module). A context of
    `GatheredParameters` does not prevent that.
    """
    before = [parameter.is_external_param for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.is_external_param = True
        yield
    finally:
        for parameter, external in zip(parameters, before, strict=True):
            parameter.is_external_param = external
