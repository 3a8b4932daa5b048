"""Directories and URLs in a config and in calls: `~` is expanded; environment variables are refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
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
            f"is a URL ({match[0]}/...), and files are written only to directories; write a directory on a disk, and "
            "the URL as checkpoint.copy_to, where checkpoints and exports are copied"
        )
    if match := _VARIABLE.search(text):
        raise ValueError(f"contains {match[0]}, but environment variables are not expanded; write the value")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(f"begins with {path.partition('/')[0]}, and there is no such user; write the whole path")
    return path


def url_of(path: str | os.PathLike[str]) -> str | None:
    """A URL, or that which a path was made of, which has lost a slash; None if it was none."""
    text = str(Path(path))
    if not _URL.match(text):
        return None
    scheme, _, rest = text.partition(":")
    return f"{scheme}:{'//' if scheme in ('file', 'local') else '/'}{rest}"


def _directory(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike) or "${" in str(value):  # of a template, which a translation keeps
        return value
    try:
        return expanded(value)
    except ValueError as error:
        raise PydanticCustomError("directory", "{what}", {"what": str(error)}) from None


def _store(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike) or "${" in str(value):
        return value
    text = os.fspath(value)
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+://?[^/]|file:/", text):
        what = "is no URL; write one with a scheme of fsspec, such as s3://bucket/run"
    elif re.search(r"//[^/@]*:[^/@]*@", text):
        what = "contains a password, which would be written into checkpoints; give it to fsspec in its configuration"
    elif match := _VARIABLE.search(text):
        what = f"contains {match[0]}, but environment variables are not expanded; write the value"
    else:
        return text
    raise PydanticCustomError("store", "{what}", {"what": what})


Store = Annotated[str | None, BeforeValidator(_store)]
"""A field for a URL of fsspec."""
Directory = Annotated[str | None, BeforeValidator(_directory)]
"""A field for a directory: text, or in Python a path."""
