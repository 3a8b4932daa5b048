"""The collective that a thread waits in.

A thread that uses no processor may also read a file, wait for a worker, or sleep. Only its innermost frame shows a
collective: it belongs to torch.distributed, or it calls a method of the `Work` of an asynchronous collective.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterator
from types import FrameType, MethodType
from typing import Any

import torch.distributed as dist

_NO_COLLECTIVES = tuple(f"{dist.__name__}.{name}." for name in ("checkpoint", "elastic", "rpc"))
"""Parts of torch.distributed that wait for disks, for processes, and for the work of other ranks."""
_CALLED = re.compile(r"(\w+(?:\.\w+)*)\(")


def group_of(frame: FrameType) -> tuple[int, ...] | None:
    """The ranks of the collective in which a thread waits; empty for all ranks, None for no collective.

    Args:
        frame: The innermost frame of the thread.
    """
    if not _is_distributed(frame):
        return () if isinstance(_called_on(frame), dist.Work) else None
    for caller in _callers(frame):
        if isinstance(group := caller.f_locals.get("group"), dist.ProcessGroup):
            return () if group is dist.group.WORLD else tuple(dist.get_process_group_ranks(group))
    return ()


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of torch.distributed that a thread is in, the innermost one first."""
    while frame is not None and _is_distributed(frame):
        yield frame
        frame = frame.f_back


def _is_distributed(frame: FrameType) -> bool:
    module = f"{frame.f_globals.get('__name__')}."
    return module.startswith(f"{dist.__name__}.") and not module.startswith(_NO_COLLECTIVES)


def _called_on(frame: FrameType) -> Any:
    """The object whose method a frame calls now; None if it calls something else, or its source cannot be read."""
    where = inspect.getframeinfo(frame, context=0).positions
    if where is None or where.lineno is None or where.col_offset is None:
        return None
    line = linecache.getline(frame.f_code.co_filename, where.lineno).encode()
    called = _CALLED.match(line[where.col_offset :].decode(errors="replace"))
    if called is None:
        return None
    name, *attributes = called[1].split(".")
    target = frame.f_locals.get(name)
    for attribute in attributes[:-1]:
        target = inspect.getattr_static(target, attribute, None)
    return target if attributes else target.__self__ if isinstance(target, MethodType) else None
