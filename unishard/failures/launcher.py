"""Ends this rank when its launcher is gone: otherwise the rank would train beside those of the next start.

Only on Linux, and only for ranks of torchrun's agent (`torchrun`, `unishard launch`, `accelerate launch`), which waits
until all its ranks have ended. A script that was started directly may outlive its shell; srun and mpirun end their
tasks themselves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from unishard.distributed.processes import is_running, machine, parent, started
from unishard.failures import monitor_client
from unishard.failures.monitor_server import RAISED

VARIABLE = "UNISHARD_LAUNCHER"
"""The environment variable in which `unishard launch` names its process, so that ranks notice its end before `prepare`
too."""
_RUN = "TORCHELASTIC_RUN_ID"
_POLL = 0.5
_TERM, _SAVING = 30.0, 300.0
"""Seconds that a rank has to end after a signal, without and with a save, as torchrun and `unishard launch` give
them."""

saving: list[int] = []
"""The signals at which this process saves and ends."""
_watching = 0


def this_process() -> str:
    """The value of `VARIABLE` for this process; empty where ends cannot be seen."""
    pid = os.getpid()
    return f"{pid} {started(pid)} {machine()}" if started(pid) and machine() else ""


def watch() -> None:
    """End this process once its launcher is gone. Does nothing the second time."""
    global _watching
    launcher = _launcher() if _watching != os.getpid() else None
    _watching = os.getpid()
    if launcher is not None:
        threading.Thread(target=_wait, args=launcher, name="unishard-launcher", daemon=True).start()


def _launcher() -> tuple[int, str] | None:
    """The number of the launcher's process and when it was started; None if there is none, or it cannot be seen."""
    if _RUN not in os.environ or not machine():
        return None
    match os.environ.get(VARIABLE, "").split(maxsplit=2):
        case [pid, when, where] if where == machine() and pid.isdecimal():
            return int(pid), when
    above = os.getppid()
    while _run_of(above) == os.environ[_RUN]:  # a shell between the agent and this process
        above = parent(above)
    return (above, started(above)) if above > 1 and started(above) else None


def _run_of(pid: int) -> str | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return None
    return next((variable.partition("=")[2] for variable in variables if variable.startswith(f"{_RUN}=")), None)


def _wait(pid: int, when: str) -> None:
    while is_running(pid, when):
        time.sleep(_POLL)
    monitor, saves = monitor_client.current(), bool(saving)
    number = signal.SIGTERM if not saving or signal.SIGTERM in saving else saving[0]
    why = f"its launcher (process {pid}) is gone"
    with contextlib.suppress(OSError, ValueError):  # the launcher may have read what this process writes
        action = "saves and ends" if saves else "ends"
        sys.stderr.write(
            f"unishard: rank {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')} {action} because "
            f"{why}\n"
        )
        sys.stderr.flush()
    if monitor is not None and not saves:
        monitor.end(f"ended because {why}", RAISED)
        monitor.printed()
    os.kill(os.getpid(), number)
    time.sleep(_SAVING if saves else _TERM)
    os._exit(128 + number)
