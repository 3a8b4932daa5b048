"""Which modules of a model an error went through."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from torch import nn


def modules_in(traceback: TracebackType | None, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that a traceback goes through, by name, the innermost first."""
    names = {module: name for name, module in model.named_modules()}
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            yield names[owner], owner
