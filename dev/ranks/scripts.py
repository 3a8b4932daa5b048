"""Starts ranks as scripts that torchrun has started, lets one of them end, and says what all write and leave."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dev.ranks.judging import newest
from dev.ranks.training import my_rank
from unishard.testing import RankFailure, run_ranks

LIMIT = 30.0
"""Seconds after which a rank that lives on counts as hung."""
Run = tuple[Callable[..., None], tuple[Any, ...]]
"""A function of a folder and of these arguments."""


class Ending(NamedTuple):
    """How a run ended."""

    lines: list[str]
    """What all ranks wrote together, in the order of writing."""
    seconds: float
    """From the fault until the last rank has ended, or has gone on."""
    codes: dict[int, str]
    """How each rank's process ended."""
    recorded: dict[int, str]
    """The message in the file that torchrun shows, by rank."""
    kept: str
    """The newest complete checkpoint, or what is wrong with it; empty if there is none."""


def started(folder: str) -> None:
    """Note when the fault happens."""
    Path(folder, "started").write_text(str(time.time()))


def gone_on(folder: str) -> None:
    """Note that this rank has got over the fault."""
    Path(folder, f"gone_on{my_rank()}").write_text(str(time.time()))


def end(kind: str, folder: str) -> None:
    """End this rank, or stop it until the other one has ended."""
    started(folder)
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LIMIT)
        case "SIGTERM, to save":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(3)
        case "out of memory":
            torch.empty(1 << 46, dtype=torch.uint8)
        case "stop":
            other = process_of(folder, 1 - my_rank())
            then = f"while kill -0 {other} 2>/dev/null; do sleep 0.1; done; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", then], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            os.kill(os.getpid(), signal.SIGSTOP)
            return
    raise ValueError("a broken sample")


def process_of(folder: str, rank: int) -> int:
    """The process of another rank."""
    return int(Path(folder, f"pid{rank}").read_text())


def _as_a_script(folder: str, function: Callable[..., None], *arguments: Any) -> None:
    """As the interpreter runs a script that torchrun has started: errors go to `sys.excepthook`, then to `atexit`."""
    file = os.open(Path(folder, "output"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    recorded = str(Path(folder, f"error{my_rank()}.json"))
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": recorded}
    Path(folder, f"pid{my_rank()}").write_text(str(os.getpid()))
    code = 0
    try:
        function(folder, *arguments)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


@cache
def endings(runs: tuple[Run, ...]) -> dict[Run, Ending]:
    """Endings of runs of two ranks each, four at a time: most of their time they wait."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(runs, pool.map(_ending_of, runs), strict=True))


def _ending_of(asked: Run) -> Ending:
    function, arguments = asked
    with tempfile.TemporaryDirectory(prefix="faults-") as name, socket.create_server(("127.0.0.1", 0)) as other_program:
        folder, codes = Path(name), {}
        (folder / "port").write_text(str(other_program.getsockname()[1]))
        try:
            run_ranks(2, _as_a_script, name, function, *arguments, timeout=60 + LIMIT, grace=LIMIT)
        except RankFailure as failure:
            codes = {rank: f"{error.type}: {error.message}" for rank, error in failure.errors.items()}
        ended = max((float(file.read_text()) for file in folder.glob("gone_on*")), default=time.time())
        output, begun = folder / "output", folder / "started"
        files = {rank: folder / f"error{rank}.json" for rank in range(2)}
        return Ending(
            output.read_text(errors="replace").splitlines() if output.exists() else [],
            ended - float(begun.read_text()) if begun.exists() else -1.0,
            codes,
            {rank: json.loads(file.read_text())["message"]["message"] for rank, file in files.items() if file.exists()},
            newest(folder / "checkpoints"),
        )
