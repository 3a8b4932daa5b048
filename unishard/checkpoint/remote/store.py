"""A folder in an object store, or on any other file system of fsspec."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unishard.config import Checkpoint
from unishard.distributed.error_text import text_of
from unishard.errors import CheckpointError, ConfigError, Problem, in_one_line

_PROOF = {"PermissionError", "FileNotFoundError", "PermissionDeniedError", "UnauthenticatedError", "NoCredentialsError"}
"""Classes of errors after which trying again is of no use: Python's, and those that clients of stores leave as they
are. Any other may be a server that is away for a moment.
"""
_LONGEST = 300


class StoreError(CheckpointError):
    """The store has not done what it was asked for."""

    def __init__(self, url: str, error: Exception) -> None:
        line = in_one_line(text_of(error).partition("\n")[0])[:_LONGEST]
        super().__init__(f"{url}: {type(error).__name__}: {line}")
        self.is_proof = any(kind.__name__ in _PROOF for kind in type(error).__mro__)
        """Whether it says that the place is not there or not allowed."""


class Store:
    """A folder in a store. Its methods raise StoreError."""

    def __init__(self, url: str, setting: str = "") -> None:
        """Open a folder, without a request to the store.

        Args:
            url: Its URL, with any scheme of fsspec.
            setting: The field of the config that has it.

        Raises:
            ConfigError: A package for this scheme is not installed, or nobody knows the scheme.
        """
        self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs

            # An instance of its own: its connections are closed with it.
            client, self._root = url_to_fs(self.url, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            raise ConfigError([Problem(setting, f"{url}: {error}; {_instead(url)}")]) from None
        if hasattr(client, "auto_mkdir"):  # of directories on this machine
            client.auto_mkdir = True
        self._files: Any = client

    def names(self, folder: str = "") -> dict[str, int | None]:
        """What is in a folder: the size of each file, and None for a folder; empty if it does not exist."""
        with self._errors(folder):
            self._files.invalidate_cache()
            try:
                entries = self._files.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
        return {
            entry["name"].rstrip("/").rpartition("/")[2]: None if entry["type"] == "directory" else entry["size"]
            for entry in entries
        }

    def sizes(self, folder: str) -> dict[str, int]:
        """The size of each file in a folder and those in it, by its path in the folder."""
        found: dict[str, int] = {}
        for name, size in self.names(folder).items():
            if size is None:
                found |= {f"{name}/{inner}": each for inner, each in self.sizes(f"{folder}/{name}").items()}
            else:
                found[name] = size
        return found

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if there is none."""
        with self._errors(name):
            try:
                return bytes(self._files.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with self._errors(name):
            self._files.pipe_file(self._path(name), data)

    def put(self, path: Path, name: str, tell: Callable[[int], None] = lambda sent: None) -> None:
        """Copy a file to the store, and tell how many bytes are sent, where its client says so."""
        from fsspec.callbacks import Callback

        sending = Callback(hooks={"tell": lambda size, value, **_: tell(value)})
        with self._errors(name):
            self._files.put_file(str(path), self._path(name), callback=sending)

    def get(self, name: str, path: Path) -> None:
        """Copy a file from the store."""
        with self._errors(name), self._files.open(self._path(name), "rb") as there, path.open("wb") as here:
            shutil.copyfileobj(there, here, 1 << 23)

    def delete(self, name: str) -> None:
        """Delete a file, which need not exist."""
        with self._errors(name):
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def delete_folder(self, folder: str) -> None:
        """Delete the files of a folder, and of file systems that have folders also this."""
        with self._errors(folder):
            if self._files.exists(self._path(folder)):
                self._files.rm(self._path(folder), recursive=True)

    def close(self) -> None:
        """Let go of its connections, which are closed with the last reference to its client."""
        self._files = None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any client
            raise StoreError(f"{self.url}/{name}" if name else self.url, error) from None


def require_installed(asked: Checkpoint) -> None:
    """Check that the package for `checkpoint.copy_to` is there.

    Raises:
        ConfigError: It is not.
    """
    if asked.copy_to is not None:
        Store(asked.copy_to, "checkpoint.copy_to")


def _instead(url: str) -> str:
    try:
        from fsspec.registry import known_implementations
    except ImportError:
        return "install it with `pip install fsspec`"
    package = known_implementations.get(url.partition("://")[0], {}).get("class", "").partition(".")[0]
    if package in ("", "fsspec"):
        return "write a URL with a scheme of fsspec, such as s3://bucket/run"
    return f"install it with `pip install {package}`"
