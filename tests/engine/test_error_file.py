"""The file in which a rank tells torchrun its error: whole, or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from unishard.failures.excepthook import record


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As torchrun names it to a rank."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_it_holds_the_error(file: Path) -> None:
    record(ValueError("a broken sample"))
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: a broken sample"
    assert [*file.parent.iterdir()] == [file]


def test_a_process_that_ends_while_it_writes_leaves_no_half_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: Any, error: BaseException) -> None:
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text('{"mess')
        raise SystemExit

    monkeypatch.setattr(ErrorHandler, "record_exception", half)
    with pytest.raises(SystemExit):
        record(ValueError("a broken sample"))
    assert not file.exists()
    assert os.environ["TORCHELASTIC_ERROR_FILE"] == str(file)
