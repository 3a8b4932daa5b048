"""Tells the ranks that wait in `unishard.prepare` of one that fails before it comes there.

Imports torch only when that happens.

It begins with the first call that belongs to a rank of a run, never with an import: `unishard.load` of what
`unishard launch` hands over, `unishard.dataloader`, or a call that waits for the other ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType

from unishard.config.topology import Topology
from unishard.distributed.error_text import readable
from unishard.errors import ConfigError

_SHOWN = 300
"""Characters of an error's text."""

_installed = False
_told = False
_process = os.getpid()


def install() -> None:
    """Watch the errors of this process if a launcher has started it as one of several ranks."""
    global _installed, _process
    try:
        topology = Topology.from_environment()
    except ConfigError:  # `prepare` raises it
        return
    if topology.world_size == 1 or _installed or _is_helper(topology):
        return
    _installed, _process = True, os.getpid()
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _is_early() and issubclass(kind, Exception):
            shown = readable(error)
            what = str(shown).strip().partition("\n")[0][:_SHOWN]
            sys.stderr.write(
                f"unishard: rank {topology.rank} of {topology.world_size} raised {kind.__name__}: {what}\n"
            )
            before(type(shown), shown, trace)
            _tell(error)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _is_helper(topology: Topology) -> bool:
    """Whether a rank's process has started this one, which has its variables and ends as it likes."""
    try:
        parent = Path(f"/proc/{os.getppid()}/environ").read_text(errors="replace")
        return Topology.from_environment(dict(each.partition("=")[::2] for each in parent.split("\0"))) == topology
    except (OSError, ConfigError):
        return False


def _is_early() -> bool:
    """Whether this process has not come to the other ranks.

    Where torch was never imported, none of them can wait for this one.
    """
    if os.getpid() != _process or _told or "torch" not in sys.modules:
        return False
    from unishard.failures import monitor_client

    return not monitor_client.has_been_open()


def _tell(error: BaseException) -> None:
    global _told
    _told = True
    with contextlib.suppress(Exception):  # this process ends with its own error
        from unishard.failures import arrival, excepthook

        excepthook.record(error)
        arrival.announce_failure(error)
