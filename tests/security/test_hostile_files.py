"""Whatever a file from outside holds, reading it ends in one error of unishard or in a result, soon, and writes nothing
elsewhere."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from absurd import ABSURD
from damage import PLACES, WHOLE, bounded, damaged, truncated, with_odd_values
from hypothesis import HealthCheck, given, settings
from readers import READERS, Reader

from unishard.errors import UnishardError

JSON = {
    "a manifest": 0,
    "the names of an export": 0,
    "the index of weights": 0,
    "a cached shape": 1,
    "a golden file": 0,
}
"""The line that holds JSON, of a file that is read line by line."""

COSTLY = {
    "the tensors of another tool's checkpoint": ("a compressed archive",),
    "DeepSpeed's optimizer": ("a compressed archive",),
    "a config": ("aliases of aliases", "lines of keys", "tags", "digits"),
    "a config of deepspeed": ("keys of a section",),
    "a config of hf": ("aliases of aliases", "merges of merges", "a key of digits", "tags"),
    "a manifest": ("digits", "keys", "braces"),
    "weights": ("headers", "a header of brackets"),
}
"""The contents of 1 MB that are dangerous for some readers. `make fuzz` gives all of them to every reader."""


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reader:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return READERS[request.param]


def ends_well(reader: Reader, path: Path, folder: Path) -> None:
    """Read a file; only unishard's own errors may come of it, in one message."""
    told = "nothing"
    with bounded(folder):
        try:
            reader.read(path)
        except UnishardError as error:
            told = str(error)
    assert told.strip(), "an error without a message"
    assert len(told) < 20_000, "an error that nobody reads"


def test_a_good_file_is_read(reader: Reader, tmp_path: Path) -> None:
    path = reader.lay_out(tmp_path)
    with bounded(tmp_path):
        reader.read(path)


def test_another_thing_in_place_of_a_file(reader: Reader, tmp_path: Path) -> None:
    path = reader.lay_out(tmp_path)
    for place, put in PLACES.items():
        if not (reader.own and place in ("a file without an end", "a link to a device")):
            path.rename(tmp_path / "good")
            put(path)
            ends_well(reader, path, tmp_path)
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            (tmp_path / "good").rename(path)


def test_another_content(reader: Reader, tmp_path: Path) -> None:
    path = reader.lay_out(tmp_path)
    valid = path.read_bytes()
    for content in (*WHOLE, *truncated(valid, 8 if reader.slow else 16)):
        path.write_bytes(content)
        ends_well(reader, path, tmp_path)


def test_a_damaged_content(reader: Reader, tmp_path: Path, examples: int) -> None:
    path = reader.lay_out(tmp_path)
    valid = path.read_bytes()

    @settings(max_examples=max(examples // 40, 1), derandomize=examples < 1000, suppress_health_check=list(HealthCheck))
    @given(damaged(valid))
    def holds(content: bytes) -> None:
        path.write_bytes(content)
        ends_well(reader, path, tmp_path)

    holds()


@pytest.mark.parametrize("name", READERS)
def test_a_megabyte_costs_seconds(name: str, examples: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    contents = ABSURD if examples >= 1000 else COSTLY.get(name, ())
    if not contents:
        pytest.skip("only `make fuzz` reads these")
    path = READERS[name].lay_out(tmp_path)
    for content in contents:
        path.write_bytes(ABSURD[content]())
        ends_well(READERS[name], path, tmp_path)


@pytest.mark.parametrize("name", JSON)
def test_another_type_at_any_place(name: str, deep: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = READERS[name].lay_out(tmp_path)
    lines, place = path.read_bytes().splitlines(), JSON[name]
    for line in islice(
        with_odd_values(lines[place]), None, None, 1 if deep else 4
    ):  # of 17 values: each at every fourth place
        path.write_bytes(b"\n".join([*lines[:place], line, *lines[place + 1 :]]))
        ends_well(READERS[name], path, tmp_path)
