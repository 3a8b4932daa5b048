"""Directories in a config and in calls: `~` is expanded; URLs and environment variables are refused."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Also as `pathlib` shortens it, with one slash."""
_VARIABLE = re.compile(r"\$(?:\{[^}]*\}|[A-Za-z_]\w*)")


def expanded(directory: str | os.PathLike[str]) -> str:
    """A path with the home directory in place of `~`.

    Raises:
        ValueError: It is a URL, or contains an environment variable or the name of an unknown user; says what to write.
    """
    text = os.fspath(directory)
    if match := _URL.match(text):
        raise ValueError(
            f"is a URL ({match[0]}/...), and files are written only to directories; write a directory, such as one "
            "where the store is mounted, or copy the directory to the store afterwards"
        )
    if match := _VARIABLE.search(text):
        raise ValueError(f"contains {match[0]}, but environment variables are not expanded; write the value")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(f"begins with {path.partition('/')[0]}, and there is no such user; write the whole path")
    return path


def _directory(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike) or "${" in str(value):  # of a template, which a translation keeps
        return value
    try:
        return expanded(value)
    except ValueError as error:
        raise PydanticCustomError("directory", "{what}", {"what": str(error)}) from None


Directory = Annotated[str | None, BeforeValidator(_directory)]
"""A field for a directory: text, or in Python a path."""
