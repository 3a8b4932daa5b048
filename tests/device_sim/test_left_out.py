"""Where the simulated device cannot be: `make device-sim` says why in a line and ends well, except on the torch that it
is made for."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

REFUSED = "streams.cpp:1: error: no member named 'markCompleted'"


@pytest.fixture
def runner(monkeypatch):
    """on_device.py, which is no part of a package."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("on_device", Path(__file__).with_name("on_device.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refuse():
    raise RuntimeError(REFUSED)


@pytest.mark.parametrize(
    ("version", "code", "word"), [("2.15.0", 0, "skipped"), ("2.11.0", 0, "skipped"), ("2.13.1+cpu", 1, "failed")]
)
def test_a_torch_that_refuses_it_is_skipped_unless_it_is_the_one_it_runs_on(
    runner, monkeypatch, capsys, version, code, word
):
    monkeypatch.setattr(runner.building, "missing", lambda: None)
    monkeypatch.setattr(runner, "built", refuse)
    monkeypatch.setattr(runner, "version", lambda name: version)
    assert runner.main([]) == code
    said = capsys.readouterr().err
    assert said == f"{word}: the simulated device is not to be had with torch {version}:\n{REFUSED}\n"


@pytest.mark.parametrize(
    ("lacks", "said"), [("c++", "needs a C++ compiler, and c++ was not found"), ("ninja", "needs ninja")]
)
def test_what_a_build_lacks_is_said(runner, monkeypatch, capsys, lacks, said):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == lacks else f"/bin/{name}")
    assert runner.main([]) == 0
    assert said in capsys.readouterr().err


def test_a_torch_that_has_cuda_is_said(runner, monkeypatch, capsys, tmp_path):
    tmp_path.joinpath("lib").mkdir()
    tmp_path.joinpath("lib", "libtorch_cuda.so").touch()
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(
        runner.building, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    )
    assert runner.main([]) == 0
    assert "needs a CPU build of torch, and this one" in capsys.readouterr().err
