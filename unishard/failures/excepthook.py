"""What a rank writes when it ends. The rank that failed first writes its error; the others write one line that names
that rank.
"""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from unishard.distributed.error_text import errors_in, readable
from unishard.errors import RankMismatchError
from unishard.failures.endings import headline, is_lost_connection
from unishard.failures.heartbeat import SILENT
from unishard.failures.monitor_client import MonitorClient
from unishard.failures.monitor_server import DIED, FOLLOWED, RAISED
from unishard.failures.rank_ending import Ending
from unishard.failures.rank_locations import where_raised
from unishard.failures.stuck_process import StuckProcess

_NEWS = 1.0
"""Seconds to wait for the error of another rank that explains this rank's."""
_PRINTED = 2.0
"""Seconds to wait until that rank has written it."""
_GONE = 5.0
"""Seconds that a rank waits for that rank to end. A launcher names the first rank that ends, and ending takes longer on
a busy host."""

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torch writes this process's error for torchrun."""
_recording = threading.Lock()

_hook: _Hook | None = None


class _Hook:
    """Replaces `sys.excepthook`; the hook before it writes this rank's own errors."""

    def __init__(self, monitor: MonitorClient) -> None:
        self.monitor = monitor
        self._process = os.getpid()
        self._before = self._first = sys.excepthook
        self._inside = False

    def put(self) -> None:
        """Become `sys.excepthook`, also if torch has put its own around this one."""
        if sys.excepthook is not self:
            self._before = sys.excepthook
            sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        """Write the error, or name the rank that has caused it."""
        if self._inside or os.getpid() != self._process:
            return self._first(kind, error, trace)
        self._inside = True
        try:
            error = readable(error)
            cause = next((raised for raised in errors_in(error) if not _follows(raised)), None)
            if cause is None:
                record(self._follow(next(errors_in(error)), trace))
            else:
                self._lead(error, trace)
                record(error)
        finally:
            self._inside = False

    def stop(self, cause: str) -> None:
        """Write that this process is stopped because no rank can go on."""
        if self.monitor.abort_reason:
            self._share(cause, f"was stopped: {cause}")
        else:
            self._write(self._because(cause))
        record(RankMismatchError(cause))

    def _lead(self, error: BaseException, trace: TracebackType | None) -> None:
        """Write an error of this rank; in one line if another rank has raised the same before."""
        headline_text = f"raised {headline(error)}"
        self.monitor.end(headline_text, RAISED)
        leader = self._first_with(headline_text)
        if leader.rank != self.monitor.rank:
            self._write_after(leader, f"raised the same error as rank {leader.rank}: {type(error).__name__}")
            return
        self._write(headline_text)
        self._before(type(error), error, trace)
        self.monitor.printed()

    def _follow(self, error: BaseException, trace: TracebackType | None) -> BaseException:
        """Write an error that another rank has caused, or that all ranks have found together; returns the one to
        record.
        """
        monitor = self.monitor
        first = monitor.first(0.0 if monitor.abort_reason else _NEWS)
        if monitor.abort_reason:
            self._share(
                monitor.abort_reason, f"raised {type(error).__name__} ({where_raised(error)}): {monitor.abort_reason}"
            )
            return RankMismatchError(monitor.abort_reason)
        if first is not None and (first.how in (RAISED, DIED, SILENT) or str(error).startswith(str(first))):
            monitor.end(f"raised {headline(error)}", FOLLOWED)
            self._write_after(first, self._because(str(first)))
            return RankMismatchError(str(first))
        if isinstance(error, RankMismatchError):
            self._share(str(error), f"raised {type(error).__name__} ({where_raised(error)}): {error}")
        else:
            monitor.end(f"raised {headline(error)}", FOLLOWED)
            self._write(f"raised {headline(error)}")
            self._before(type(error), error, trace)
        return error

    def _share(self, error: str, text: str) -> None:
        """Write an error of all ranks on the first one that ends with it."""
        ending = f"raised RankMismatchError: {error}"
        self.monitor.end(ending, FOLLOWED)
        leader = self._first_with(ending)
        if leader.rank != self.monitor.rank:
            self._write_after(leader, f"ended for the same reason as rank {leader.rank}")
            return
        self._write(text)
        self.monitor.printed()

    def _first_with(self, text: str) -> Ending:
        """The ending of the first rank that ends with this text: this one's, if no other does."""
        endings = self.monitor.endings.values()
        return next(ending for ending in endings if ending.text == text or ending.rank == self.monitor.rank)

    def _because(self, cause: str) -> str:
        place, first = self.monitor.place(), self.monitor.first()
        exchanges = any(f".{call} " in place for call in ("forward", "backward"))
        # gloo aborts a process that gathers other weights, or reduces other gradients.
        if exchanges and first is not None and first.how == DIED and not torch.cuda.is_available():
            cause += (
                "; if it wrote that gloo received another size, it ran other modules than this rank: see "
                "sharding.conditional_modules"
            )
        return (
            f"ended {place.removeprefix('is ')} because {cause}"
            if place.startswith("is in ")
            else f"ended because {cause}"
        )

    def _write_after(self, other: Ending, text: str) -> None:
        """Write a line once another rank has written its error, and wait until that rank has ended. The launcher then
        sees that rank first.
        """
        self.monitor.wait(lambda: self.monitor.has_printed(other.rank), _PRINTED)
        self._write(text)
        self.monitor.wait(lambda: self.monitor.is_gone(other.rank), _GONE)

    def _write(self, text: str) -> None:
        sys.stderr.write(
            f"unishard: rank {self.monitor.rank} of {self.monitor.size} {text}\n"
        )  # at once, so that lines of ranks do not mix
        sys.stderr.flush()


def _follows(error: BaseException) -> bool:
    """Whether another rank may have caused an error."""
    return isinstance(error, RankMismatchError) or is_lost_connection(error)


def record(error: BaseException) -> None:
    """Write torchrun's error file, as `torch.distributed.elastic.multiprocessing.errors.record` does.

    It appears whole or not at all: this process may be ended at any time, and torchrun cannot read half a file (torch
    2.13, errors/__init__.py, ProcessFailure).
    """
    if not dist.is_torchelastic_launched():
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    error = readable(error)
    with _recording:
        file = os.environ.get(_ERROR_FILE)
        part = f"{file}.{os.getpid()}"
        try:
            if file:
                os.environ[_ERROR_FILE] = part
            raise error
        except BaseException:
            get_error_handler().record_exception(error)
        finally:
            if file:
                os.environ[_ERROR_FILE] = file
        if file and os.path.exists(part):
            os.replace(part, file)


def install(monitor: MonitorClient) -> None:
    """Write this process's errors by the rules of this module, and end the process where it would wait for ranks that
    are gone.

    Call it again after the process group has started: torch then replaces `sys.excepthook`.
    """
    global _hook
    if _hook is None or _hook.monitor is not monitor:
        _hook = _Hook(monitor)
        monitor.when_doomed = StuckProcess(monitor, _hook.stop).look
    _hook.put()
