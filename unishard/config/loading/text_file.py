"""Read the text of a config file, or say why it cannot be read."""

from __future__ import annotations

import os
import stat
from difflib import get_close_matches
from pathlib import Path

from unishard.config.loading.origins import file_error

_LARGEST = 2**20


def text_of(path: Path, largest: int = _LARGEST) -> str:
    """The text of a config file.

    Args:
        path: The file.
        largest: Its largest size in bytes.

    Raises:
        ConfigError: The file does not exist or is not text.
    """
    content = _bytes(path, largest)
    if len(content) > largest:
        raise file_error(path, f"is larger than {largest} bytes; name a config file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise file_error(
            path, f"is not UTF-8 text (byte 0x{byte:02x} at offset {error.start}); name a YAML file saved as UTF-8"
        ) from None


def _bytes(path: Path, largest: int) -> bytes:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            content = file.read(largest + 1)
            if not content and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise file_error(path, "is an empty pipe; name a YAML file, or start the writer of the pipe first")
            return content
    except FileNotFoundError:
        near = get_close_matches(
            path.name, (p.name for kind in ("*.y*ml", "*.json", "*.toml") for p in path.parent.glob(kind)), 1
        )
        hint = f"did you mean {str(path.parent / near[0])!r}?" if near else "name a YAML file"
        raise file_error(path, f"file not found; {hint}") from None
    except IsADirectoryError:
        raise file_error(path, "is a directory; name a YAML file in it") from None
    except OSError as error:
        raise file_error(path, f"cannot be read ({error.strerror}); name a readable YAML file") from None
    except ValueError as error:  # a NUL in the name
        raise file_error(path, f"is not a path ({error}); name a YAML file") from None


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe, whose content is waited for."""
    wait_not = getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags | wait_not)
    if wait_not:
        os.set_blocking(descriptor, True)
    return descriptor
