"""A virtual environment for one version set: built, used and removed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dev.versions.sets import ROOT, VersionSet

__all__ = ["NotInstallable", "environment", "interpreter", "last_lines", "run"]

_INSTALLING = 3600
"""Seconds: a CUDA build of torch is some gigabytes."""


class NotInstallable(Exception):
    """The environment cannot be built; the message says why."""


@contextmanager
def environment(version_set: VersionSet, existing: Path | None, keep: bool) -> Iterator[Path]:
    """The Python of an environment that holds a version set.

    Args:
        version_set: What to install.
        existing: An environment to use as it is.
        keep: Whether to leave the new environment where it is.

    Raises:
        NotInstallable: There is no such Python, or pip refuses.
    """
    if existing is not None:
        yield existing.absolute() / "bin/python"
        return
    folder = Path(tempfile.mkdtemp(prefix=f"versions-{version_set.name}-"))
    try:
        python = folder / "bin/python"
        _installing([interpreter(version_set.python), "-m", "venv", folder])
        if version_set.torch_first:
            _installing([python, "-m", "pip", "install", *version_set.torch_first])
        _installing([python, "-m", "pip", "install", f"{ROOT}[all]", *version_set.pins])
        yield python
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def interpreter(version: str) -> Path:
    """A Python of this version that can make virtual environments: on PATH, or one of pyenv's.

    Raises:
        NotInstallable: There is none.
    """
    name = f"python{version}"
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for python in (*(folder / name for folder in folders), *sorted(pyenv.glob(f"versions/{version}.*/bin/{name}"))):
        if python.is_file() and run([python, "-c", "import ensurepip, venv"], timeout=60).returncode == 0:
            return python
    raise NotInstallable(f"{name} was not found; install it, or put it on PATH")


def _installing(command: list[str | Path]) -> None:
    done = run(command, timeout=_INSTALLING)
    if done.returncode:
        raise NotInstallable(last_lines(done.stdout, 2))


def run(command: list[str | Path], *, timeout: float, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that sees nothing of this environment and no GPU; past its time it returns 124."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "DS_"))}
    environ = clean | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    # Programs of the environment come first: torch and DeepSpeed look for ninja on PATH.
    environ["PATH"] = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        os.killpg(process.pid, 9)  # its ranks too
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return subprocess.CompletedProcess(command, 124, f"{output}\nran longer than {timeout:.0f} seconds")
    return subprocess.CompletedProcess(command, process.returncode, output)


def last_lines(output: str, number: int = 1) -> str:
    """The end of what a program printed, without what pip says of itself."""
    lines = [
        line.strip()
        for line in output.splitlines()
        if line.strip() and not re.match(r"\[notice\]|WARNING: ", line.strip())
    ]
    return " ".join(lines[-number:]) or "no output"
