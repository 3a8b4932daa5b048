"""Nonsense in a manifest, and a pipe in place of a file: one clear error, and no reader that waits."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
from stored import store
from typer.testing import CliRunner

from unishard.checkpoint import finding, manifest, metadata
from unishard.checkpoint.convert import convert
from unishard.checkpoint.tensor_reader import Tensors
from unishard.cli import app
from unishard.errors import CheckpointError

DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("sound")
    store(
        folder,
        optimizer={"class_name": "SGD", "groups": [{"names": ["a.weight"], "options": {"lr": 0.1}}]},
        schedule={"updates": 3, "peaks": [0.1]},
        loss_scale={"value": 2.0, "made": 1},
        run="a" * 8,
        commit=1,
    )
    return folder


@pytest.fixture
def edited(sound: Path) -> Any:
    """Edits the manifest for a test, without its checksum."""
    path = sound / "manifest.json"
    before = path.read_bytes()

    def edit(where: str, value: object) -> Path:
        said = json.loads(before)
        del said["crc32"]
        at = said
        *outer, last = where.split("/")
        for key in outer:
            at = at[int(key) if isinstance(at, list) else key]
        at[last] = copy.deepcopy(value)
        path.write_text(json.dumps(said))
        return sound

    yield edit
    path.write_bytes(before)


NONSENSE = [
    ("step", -1),
    ("step", 10**30),
    ("step", "9" * 5000),
    ("world_size", 0),
    ("world_size", 10**12),
    ("run", "../../x"),
    ("commit", -1),
    ("crc32", "x"),
    ("model/numel", -1),
    ("schedule/updates", -1),
    ("schedule/torch", {}),
    ("schedule/torch", {"class_name": "LambdaLR"}),
    ("loss_scale/value", 0),
    ("loss_scale/value", float("nan")),
    ("loss_scale/made", -1),
    (f"files/{DATA}/bytes", -1),
    (f"files/{DATA}/bytes", 10**400),
    (f"files/{DATA}/crc32", ""),
    ("tensors/model.a.weight/shape", [-7, 11]),
    ("tensors/model.a.weight/shape", [2**61] * 9),
    ("tensors/model.a.weight/dtype", "float" + "9" * 5000),
    ("tensors/model.a.weight/dtype", ""),
    ("tensors/model.a.weight/hash", "x"),
    ("files/", {"bytes": 1, "crc32": "0" * 8}),
    ("files/\0", {"bytes": 1, "crc32": "0" * 8}),
]


@pytest.mark.parametrize(("where", "value"), NONSENSE, ids=lambda each: repr(each)[:40])
def test_a_nonsense_manifest_is_one_error_that_names_the_field(edited: Any, where: str, value: object) -> None:
    folder = edited(where, value)
    with pytest.raises(CheckpointError) as error:
        manifest.read(folder)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{folder}/manifest.json: {where.replace('/', '.').rstrip('.' + chr(0))}")
    assert len(line) < 400


def test_no_command_ends_in_a_traceback_on_a_nonsense_manifest(edited: Any, tmp_path: Path) -> None:
    others = [
        ("config", {"sharding": 3, "training": []}),
        ("files/\0", {"bytes": 1, "crc32": "0" * 8}),
        ("ties", {"x": "y", "": ""}),
        ("norms", {"parameters": float("inf")}),
        ("data", [3, "x"]),
        ("state", {"$tensor": ["float32", []]}),
    ]
    for where, value in [*NONSENSE[:3], *others]:
        folder = str(edited(where, value))
        for command in (
            ["inspect", "--tensors"],
            ["inspect", "--json"],
            ["verify", "--bits"],
            ["diff", folder],
            ["convert", f"{tmp_path}/a"],
        ):
            shown = CliRunner().invoke(app, ["checkpoint", command[0], folder, *command[1:]])
            assert shown.exception is None or isinstance(shown.exception, SystemExit), (where, command, shown.exception)
            rmtree(tmp_path / "a", ignore_errors=True)


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    return Path(copytree(sound, tmp_path / "step-00000030"))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("manifest.json", manifest.read),
        (".metadata", metadata.read),
        (DATA, lambda folder: Tensors(folder).full("model.scale")),
        (DATA, lambda folder: convert(folder, folder.parent / "copy")),
    ],
)
def test_a_pipe_in_place_of_a_file_is_an_error_and_keeps_nobody_waiting(copied: Path, name: str, read: Any) -> None:
    (copied / name).unlink()
    os.mkfifo(copied / name)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}.* not a file but a pipe, a socket or a device"):
        read(copied)


def test_a_pipe_in_place_of_latest_is_passed_over(copied: Path) -> None:
    os.mkfifo(copied.parent / "latest")
    assert finding.latest(copied.parent) == copied
