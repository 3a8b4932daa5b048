"""What other ranks wrote must be visible to rank 0, at once or soon."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from unishard.checkpoint import shared_folder
from unishard.checkpoint.shared_folder import require_complete
from unishard.errors import CheckpointError

FILES = {"__0_0.distcp": (3, 0), "__1_0.distcp": (5, 0)}


def test_a_missing_or_short_file_of_another_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "_PATIENCE", 0)
    (tmp_path / "__0_0.distcp").write_bytes(b"abc")
    with pytest.raises(
        CheckpointError, match=r"__1_0\.distcp: cannot be found \(No such file.* one disk that all nodes share"
    ):
        require_complete(tmp_path, FILES)
    (tmp_path / "__1_0.distcp").write_bytes(b"abcd")
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: has 4 bytes instead of 5 on rank 0"):
        require_complete(tmp_path, FILES)


def test_a_file_that_becomes_visible_late_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"abc")
    late = threading.Timer(0.1, (tmp_path / "__1_0.distcp").write_bytes, [b"abcde"])
    late.start()
    require_complete(tmp_path, FILES)
    late.join()
