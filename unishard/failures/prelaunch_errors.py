"""Report a rank that fails before `unishard.prepare` to the ranks that already wait there.

Importing unishard installs nothing. The first call of a rank in a run does: `unishard.load` of the config from
`unishard launch`, `unishard.dataloader`, or a call that waits for the other ranks. Torch is imported only when a rank
fails.
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
_announced = False
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
            first_line = str(shown).strip().partition("\n")[0][:_SHOWN]
            sys.stderr.write(
                f"unishard: rank {topology.rank} of {topology.world_size} raised {kind.__name__}: {first_line}\n"
            )
            before(type(shown), shown, trace)
            _tell(error)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _is_helper(topology: Topology) -> bool:
    """Whether a rank's process has started this one. It inherits the rank's variables, but is not a rank."""
    try:
        parent = Path(f"/proc/{os.getppid()}/environ").read_text(errors="replace")
        return (
            Topology.from_environment(dict(variable.partition("=")[::2] for variable in parent.split("\0"))) == topology
        )
    except (OSError, ConfigError):
        return False


def _is_early() -> bool:
    """Whether this process has not yet connected to the other ranks.

    If it has never imported torch, no other rank can wait for it.
    """
    if os.getpid() != _process or _announced or "torch" not in sys.modules:
        return False
    from unishard.failures import monitor_client

    return not monitor_client.has_been_open()


def _tell(error: BaseException) -> None:
    global _announced
    _announced = True
    with contextlib.suppress(Exception):  # this process ends with its own error
        from unishard.failures import arrival, excepthook

        excepthook.record(error)
        arrival.announce_failure(error)
