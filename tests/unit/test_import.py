"""`import unishard` changes nothing of the process, also in one of several ranks."""

from __future__ import annotations

import os
import subprocess
import sys

RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
CODE = """
import atexit, logging, os, signal, sys, threading, warnings
import importlib.metadata, pathlib, pydantic, ruamel.yaml  # which have filters for their own warnings

opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)


def state():
    return {
        "hooks": [sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook],
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "wakeup": signal.set_wakeup_fd(-1),
        "environment": dict(os.environ),
        "atexit": atexit._ncallbacks(),
        "filters": list(warnings.filters),
        "threads": threading.enumerate(),
        "logging": [logging.getLogger().handlers[:], logging.getLogger("unishard").handlers[:]],
        "streams": [sys.stdout, sys.stderr],
        "folder": os.getcwd(),
    }


before = state()
import unishard

print([name for name, value in state().items() if value != before[name]])
print([name for name in opened if name.startswith("/proc")])
print([name for name in ("torch", "numpy", "deepspeed") if name in sys.modules])
"""


def test_importing_changes_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | RANK, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[]", "[]", "[]"], (
        "what has changed; what was read of other processes; what it has imported"
    )
