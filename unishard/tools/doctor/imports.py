"""Import an engine without its output, and report why if it cannot be imported."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress what engines print, log and warn about while they are imported: stdout is only for the report."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def failure(package: str) -> str:
    """Why a package cannot be imported, in one line; empty if it can."""
    try:
        with quietly():
            import_module(package)
    except (
        Exception
    ) as error:  # a broken installation can raise anything: ImportError, OSError, RuntimeError, AttributeError
        return one_line(error)
    return ""


def one_line(error: BaseException) -> str:
    """An exception's class and the first line of its message."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
