"""Starts Python programs as forks of a process that has imported torch and the engines, in place of interpreters that
import them again.

A rank that a launcher starts needs 8 s of CPU time to import what it uses, and a tenth of that for what a test looks
at.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import inspect
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from unishard.testing import run_ranks

__all__ = ["completed", "in_a_fork", "instead_of_exec", "run"]

_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOGLEVEL")
_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of linux/prctl.h."""
_MOST = 1 << 17
"""Bytes of a request."""
_start_anew = subprocess.Popen._execute_child
_ARGUMENTS = inspect.signature(_start_anew)


def in_a_fork(call: Callable[..., Any], *arguments: Any, timeout: float = 300.0) -> Any:
    """What a function returns in a process that is no rank, and starts Python programs as forks of itself."""
    return run_ranks(1, _called, call, arguments, timeout=timeout)[0]


def completed(command: list[Any], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a script or a module, in a fork."""
    done: subprocess.CompletedProcess[Any] = in_a_fork(_completed, [str(word) for word in command], options)
    return done


def _called(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    for name in _LAUNCHERS:
        os.environ.pop(name, None)
    instead_of_exec()
    return call(*arguments)


def _completed(command: list[str], options: dict[str, Any]) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(command, **options)


def instead_of_exec() -> None:
    """Let `subprocess` start scripts and modules of this interpreter as forks of this process as it is now, here and in
    what they start.

    They are children of the process that starts them, with their own arguments, environment, streams and session. Call
    it on a rank of `run_ranks`, before anything has started a thread.
    """
    if sys.platform != "linux":
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    if os.fork() == 0:
        _serve(theirs)
    theirs.close()

    def start(process: Any, *given: Any) -> None:
        said = _ARGUMENTS.bind(process, *given).arguments
        words = [os.fsdecode(word) for word in said["args"]] if isinstance(said["args"], list | tuple) else []
        words = [word for place, word in enumerate(words) if (place, word) != (1, "-u")]
        if said["shell"] or len(words) < 2 or words[0] != sys.executable or words[1] in ("-c", "-S"):
            _start_anew(process, *given)
            return
        pipes = [
            (said["p2cread"], said["p2cwrite"]),
            (said["c2pwrite"], said["c2pread"]),
            (said["errwrite"], said["errread"]),
        ]
        streams = [number if one == -1 else one for number, (one, _) in enumerate(pipes)]
        environ = dict(os.environ if said["env"] is None else said["env"])
        request = words[1:], environ, os.fspath(said["cwd"] or os.getcwd()), said["start_new_session"]
        socket.send_fds(ours, [pickle.dumps(request)], streams)
        process.pid, process._child_created = int(ours.recv(20)), True
        devnull = getattr(process, "_devnull", None)
        for child, parent in pipes:
            if -1 not in (child, parent) and child != devnull:
                os.close(child)
        if devnull is not None:
            os.close(devnull)
        process._closed_child_pipe_fds = True

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]


def _serve(requests: socket.socket) -> NoReturn:
    """Start what is asked for until the process that asks has ended. What outlives its parent becomes a child of that
    process."""
    os.dup2(requests.fileno(), 3)
    os.closerange(4, 1 << 16)
    gc.freeze()  # nothing closes a number again that is now another file's
    # torchrun's agent looks at its stack again and again, and `inspect` then searches all modules for what is no file.
    inspect.modulesbyfile.update({"<frozen runpy>": "runpy", "<string>": "__main__"})  # type: ignore[attr-defined]
    server = socket.socket(fileno=3)
    while True:
        sent, streams, _, _ = socket.recv_fds(server, _MOST, 3)
        if not sent:
            os._exit(0)
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            between, pid = os.getpid(), os.fork()
            if pid == 0:
                while os.getppid() == between:
                    time.sleep(0.001)
                _run(streams, *pickle.loads(sent))
            os.write(tell, b"%d" % pid)
            os._exit(0)
        os.waitpid(between, 0)
        server.send(os.read(told, 20))
        for number in (told, tell, *streams):
            os.close(number)


def _run(streams: list[int], words: list[str], environ: dict[str, str], folder: str, new_session: bool) -> NoReturn:
    """Be the program that was asked for."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1 << 16)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, open(number, "w" if number else "r", buffering=1, closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    if new_session:
        os.setsid()
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # also where the tests run in the background, which ignores it
    resource_tracker._resource_tracker.__dict__.update(_fd=None, _pid=None)
    run(words)


def run(words: list[str]) -> NoReturn:
    """What `python` does with these words, in this process and to its end."""
    code = 0
    try:
        instead_of_exec()
        if words[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).parent))
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)
