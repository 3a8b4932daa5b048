"""Files that are written past the kernel's cache: every byte, on any file system, and every failure told."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from unishard.checkpoint import direct_file
from unishard.checkpoint.direct_file import BUFFER, DirectFile

LENGTHS = [[0], [1], [4095, 1], [4096], [4097], [BUFFER], [BUFFER - 1, 2], [7, 3 * BUFFER, 5 * BUFFER + 4096, 1]]


def written(path: Path, lengths: list[int]) -> bytes:
    pieces = [os.urandom(length) for length in lengths]
    with DirectFile(path) as file:
        for piece in pieces:
            file.write(memoryview(piece))
    whole = b"".join(pieces)
    assert (file.size, file.crc) == (len(whole), zlib.crc32(whole))
    return whole


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_byte_is_in_the_file(tmp_path: Path, lengths: list[int]) -> None:
    whole = written(tmp_path / "file", lengths)
    assert (tmp_path / "file").read_bytes() == whole


def test_a_former_file_of_that_name_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * BUFFER))
    assert written(tmp_path / "file", [5]) == (tmp_path / "file").read_bytes()


def test_a_file_system_that_does_not_open_files_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str, flags: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(direct_file, "_open_direct", refused)
    assert written(tmp_path / "file", [BUFFER, 17]) == (tmp_path / "file").read_bytes()


class Refusing:
    """A file that takes nothing of it, or a part."""

    def __init__(self, file: Any, error: int, after: int) -> None:
        self._file, self._error, self._after = file, error, after

    def write(self, piece: memoryview) -> int:
        import fcntl

        direct = fcntl.fcntl(self._file.fileno(), fcntl.F_GETFL) & os.O_DIRECT
        if self._after <= 0 and (direct or self._error != errno.EINVAL):
            raise OSError(self._error, os.strerror(self._error))
        self._after -= len(piece)
        return int(self._file.write(piece[: len(piece) // 2 // 4096 * 4096 or len(piece)]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Refusing:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def refusing(monkeypatch: pytest.MonkeyPatch, error: int, after: int) -> None:
    opened = direct_file._open
    monkeypatch.setattr(direct_file, "_open", lambda path: Refusing(opened(path), error, after))


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
@pytest.mark.parametrize("after", [0, 2 * BUFFER])
def test_a_file_system_that_opens_them_and_then_does_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    refusing(monkeypatch, errno.EINVAL, after)
    assert written(tmp_path / "file", [5 * BUFFER, 17]) == (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("lengths", [[1], [20 * BUFFER]], ids=["found at the end", "found on the way"])
def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    refusing(monkeypatch, errno.ENOSPC, 0)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        written(tmp_path / "file", lengths)


def test_what_stops_the_writing_is_not_hidden_by_what_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, errno.ENOSPC, 0)

    def interrupted() -> None:
        with DirectFile(tmp_path / "file") as file:
            file.write(bytes(BUFFER))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


AT_THE_END = """
import sys, threading, time
from unishard.checkpoint.direct_file import BUFFER, DirectFile

def late():
    threading.main_thread().join()
    time.sleep(0.5)  # until Python has told its pools of threads
    with DirectFile(sys.argv[1]) as file:
        for _ in range(5):
            file.write(bytes(BUFFER))

threading.Thread(target=late).start()
"""


def test_a_script_that_ends_meanwhile_has_the_whole_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", AT_THE_END, tmp_path / "file"], check=True, timeout=120)
    assert (tmp_path / "file").read_bytes() == bytes(5 * BUFFER)
