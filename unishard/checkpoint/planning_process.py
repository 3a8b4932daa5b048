"""Plans saves in a child process: the arithmetic holds Python's lock most of the time, and would delay the steps of the
training.

The child is a fresh interpreter: a fork would copy the state of CUDA and of threads, and `multiprocessing` would import
the script again.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from unishard.checkpoint.planning import Packed, Planning, RankResult, SaveResult

_START = """
import os, signal, sys
for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
parent, sys.path[:] = int(sys.argv[1]), sys.argv[2:]
from unishard.checkpoint.planning_process import serve
serve(parent, answers)
"""
"""A cluster signals all processes of a job, and what is printed goes to stderr: answers leave through what was
stdout."""
_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
}
"""The child is no rank and uses no device."""
_PATIENCE = 120.0
"""Seconds until the child must have imported what it needs."""
_POLL = 0.5


class PlanningProcess:
    """Does what `Planning` does, in a child process, which ends with this one."""

    def __init__(self) -> None:
        """Start the child, and wait until it is ready.

        Raises:
            OSError: It does not start.
        """
        command = [
            sys.executable,
            "-c",
            _START,
            str(os.getpid()),
            *(entry for entry in sys.path if isinstance(entry, str)),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **_ALONE}
        )
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if not selector.select(_PATIENCE):
                self.close()
                raise TimeoutError(f"the process that plans saves has not started within {_PATIENCE:.0f} s")
        self._receive()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def _answers(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def require(self) -> None:
        """Check that the child is there.

        Raises:
            ChildProcessError: It has ended.
        """
        if self._process.poll() is not None:
            raise self._lost()

    def plan(self, chunk: int, everyone: Sequence[tuple[Packed | None, Packed]]) -> list[tuple[bytes | None, bytes]]:
        """See `Planning`. Raises ChildProcessError if the child ends meanwhile."""
        return self._ask("plan", chunk, everyone)  # type: ignore[no-any-return]

    def finish(self, folder: Path, ties: Mapping[str, str], ranks: Sequence[RankResult]) -> SaveResult:
        """See `Planning`. Raises ChildProcessError if the child ends meanwhile."""
        return self._ask("finish", folder.absolute(), ties, ranks)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the child, which has nothing to finish between two saves."""
        self._process.kill()
        with contextlib.suppress(OSError), self._process:  # flushing what could not be sent fails
            pass

    def _ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            _send(self._process.stdin, (method, arguments, named))
        except OSError as error:
            raise self._lost() from error
        except BaseException:
            self.close()
            raise
        value, problem = self._receive()
        if problem is not None:
            raise problem
        return value

    def _receive(self) -> Any:
        try:
            return pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._lost() from error
        except BaseException:  # the next answer would be that to another question
            self.close()
            raise

    def _lost(self) -> ChildProcessError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10 * _POLL)
        self.close()
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ChildProcessError(f"the process that plans saves has ended ({how})")


def serve(parent: int, answers: IO[bytes]) -> None:
    """Answer questions until there are no more, or the process that asks them is gone."""
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    planning = Planning()
    _send(answers, None)
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            method, arguments, named = pickle.load(sys.stdin.buffer)
            value, problem = None, None
            try:
                value = getattr(planning, method)(*arguments, **named)
            except Exception as error:  # whatever it is, who asked raises it
                problem = error
            _send(answers, (value, problem))


def _end_after(parent: int) -> None:
    """End with the process that has started this one.

    A process that it has forked, such as a data loader's, keeps the pipe open.
    """
    while os.getppid() == parent:
        time.sleep(_POLL)
    os._exit(1)


def _send(pipe: Any, message: Any) -> None:
    pickle.dump(message, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()
