"""Damage is named, whatever it is; what is sound, and what is equal, is not."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored import store, tensors

from unishard.checkpoint import directory, manifest, writing
from unishard.checkpoint.comparing import compare, to_read
from unishard.checkpoint.manifest import FileFacts, Manifest, TensorFacts
from unishard.checkpoint.tensor_reader import Tensors
from unishard.checkpoint.verifying import blocks_of, damaged, hashes_of
from unishard.errors import CheckpointError

DATA = "__0_0.distcp"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(writing, "CHUNK", 64)
    monkeypatch.setattr("unishard.checkpoint.verifying.CHUNK", 64)
    store(tmp_path / "a")
    return tmp_path / "a"


def changed(facts: Manifest, **said: object) -> Manifest:
    return facts.model_copy(update=said)


def test_what_is_sound_is_said_to_be(folder: Path) -> None:
    facts = manifest.read(folder)
    read: list[int] = []
    assert damaged(folder, facts, advance=read.append) == []
    assert sum(read) == sum(file.bytes for file in facts.files.values())
    read.clear()
    assert hashes_of(folder, facts, read.append) == []
    assert sum(read) == 2 * 308 + 2 + 3 + 308 + 4 + 16, "the tie is read under both names"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, derandomize=True)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), name=st.sampled_from([DATA, ".metadata"]))
def test_a_flipped_bit_is_named(folder: Path, where: float, bit: int, name: str) -> None:
    facts, path = manifest.read(folder), folder / name
    data = path.read_bytes()
    at = int(where * len(data))
    path.write_bytes(data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :])
    try:
        (problem,) = damaged(folder, facts)
    finally:
        path.write_bytes(data)
    assert problem.startswith(f"{path}: has CRC-32 ")
    assert problem.endswith(f" instead of {facts.files[name].crc32}")


def test_other_damage_is_named(folder: Path) -> None:
    facts = manifest.read(folder)
    (folder / "more").mkdir()
    (folder / "more" / "stray").touch()
    data = (folder / DATA).read_bytes()
    (folder / DATA).write_bytes(data[:-5])
    (folder / ".metadata").unlink()
    assert sorted(damaged(folder, facts)) == [
        f"{folder}/.metadata: cannot be read (No such file or directory)",
        f"{folder}/{DATA}: has {len(data) - 5} bytes instead of {len(data)}",
        f"{folder}/more/stray: is not in the manifest",
    ]
    assert damaged(folder, facts, names=[DATA]) == [
        f"{folder}/{DATA}: has {len(data) - 5} bytes instead of {len(data)}"
    ]


def test_a_manifest_cannot_send_us_elsewhere(folder: Path) -> None:
    (folder.parent / "secret").write_text("x")
    for name in ("../secret", str(folder.parent / "secret")):
        facts = changed(manifest.read(folder), files={name: FileFacts(bytes=1, crc32="0" * 8)})
        assert "lies outside the directory" in damaged(folder, facts, names=[name])[0]


def test_tensors_that_are_not_what_the_manifest_says(folder: Path) -> None:
    facts = manifest.read(folder)
    said = {name: each for name, each in facts.tensors.items() if name != "model.mask"}
    weight = said["model.a.weight"]
    said["model.a.weight"] = weight.model_copy(update={"hash": "0" * 16})
    said["model.scale"] = said["model.scale"].model_copy(update={"dtype": "float16"})
    said["model.new"] = TensorFacts(shape=[1], dtype="float32", hash="0" * 16)
    assert sorted(hashes_of(folder, changed(facts, tensors=said))) == [
        f"{folder}: model.a.weight has hash {weight.hash} instead of {'0' * 16}",
        f"{folder}: model.mask is not in the manifest",
        f"{folder}: model.new is missing",
        f"{folder}: model.scale is bfloat16 [] instead of float16 []",
    ]


def test_a_tensor_that_cannot_be_read_is_named_and_the_others_are_read(folder: Path) -> None:
    data = (folder / DATA).read_bytes()
    (folder / DATA).write_bytes(data[: len(data) // 2])
    problems = hashes_of(folder, manifest.read(folder))
    assert 0 < len(problems) < len(manifest.read(folder).tensors)
    assert all("cannot be read" in problem for problem in problems)


def test_a_tensor_is_never_in_memory_as_a_whole(folder: Path) -> None:
    blocks = list(blocks_of(Tensors(folder), "model.a.weight"))
    assert max(values.nbytes for _, values in blocks) <= 64
    assert torch.equal(torch.cat([values for _, values in blocks]), tensors()["model.a.weight"].reshape(-1))


def test_a_damaged_manifest_is_one_error(folder: Path) -> None:
    path = folder / "manifest.json"
    data = path.read_bytes()
    for wrong in (
        b"",
        b"{",
        data.replace(b"step", b"\xff\xfe", 1),
        data.replace(b'"step": 30', b'"step": "x"'),
        b"[" * 100_000,
    ):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"manifest\.json: .*damaged"):
            manifest.read(folder)


def test_no_flipped_bit_of_a_manifest_goes_unnoticed(folder: Path) -> None:
    path = folder / "manifest.json"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << (at % 7))]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match=r"manifest\.json: .*damaged"):
            manifest.read(folder)
    for length in range(0, len(data), 11):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"manifest\.json: .*damaged"):
            manifest.read(folder)


def test_a_manifest_may_be_edited_by_who_says_so(folder: Path) -> None:
    path = folder / "manifest.json"
    edited = path.read_text().replace('"step": 30', '"step": 31')
    path.write_text(edited)
    with pytest.raises(CheckpointError, match="if you edited it, remove the entry `crc32`"):
        manifest.read(folder)
    path.write_text(re.sub(r',\n "crc32": "\w+"', "", edited))
    assert manifest.read(folder).step == 31


def test_a_manifest_of_a_run_that_diverged_is_read(folder: Path) -> None:
    norms = {"parameters": math.nan, "exp_avg": math.inf}
    store(folder.parent / "b", norms=norms, state={"lowest": -math.inf, "name": "Größe"})
    found = manifest.read(folder.parent / "b")
    assert math.isnan(found.norms["parameters"])
    assert (found.norms["exp_avg"], found.state) == (math.inf, {"lowest": -math.inf, "name": "Größe"})


def test_what_is_no_json_is_refused_before_anything_is_written(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        directory.write_manifest(folder.parent, changed(manifest.read(folder), state={"x": object()}))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["a"]


# -- two of them -----------------------------------------------------------------------------------


def sizes(folder: Path) -> int:
    return sum(facts.bytes for facts in manifest.read(folder).files.values())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [DATA, ".metadata"])
def test_a_damaged_checkpoint_is_not_compared(folder: Path, name: str) -> None:
    """The hashes of both manifests agree; the file says something else."""
    shutil.copytree(folder, folder.parent / "b")
    data = (folder / name).read_bytes()
    at = data.index(tensors()["model.a.weight"].numpy().tobytes()[:8]) if name == DATA else len(data) // 2
    flip(folder.parent / "b" / name, at)
    for pair in ((folder, folder.parent / "b"), (folder.parent / "b", folder)):
        with pytest.raises(CheckpointError, match=re.escape(f"{folder.parent}/b/{name}: has CRC-32")):
            compare(*pair)


def test_equal_checkpoints(folder: Path) -> None:
    store(folder.parent / "b", written="2027-01-01T00:00:00+00:00", versions={"torch": "3.0"})
    found = compare(folder, folder.parent / "b")
    assert not any((found.facts, found.only_a, found.only_b, found.forms, found.values))
    assert found.tensors == 7
    assert to_read(folder, folder.parent / "b") == sizes(folder) + sizes(folder.parent / "b")


def test_what_differs(folder: Path) -> None:
    other = tensors()
    other["model.a.weight"][2, 3] += 4
    other["model.a.weight"][6, 10] = 0
    other["model.scale"] = other["model.scale"].float()
    other["model.new"] = other.pop("model.mask")
    config = {"backend": "deepspeed", "sharding": {"strategy": "full_shard"}, "training": {"seed": 2}}
    store(folder.parent / "b", other, step=40, world_size=4, config=config)
    read: list[int] = []
    found = compare(folder, folder.parent / "b", read.append)
    assert found.facts == [
        ("step", 30, 40),
        ("world_size", 2, 4),
        ("config.backend", "fsdp", "deepspeed"),
        ("config.training.seed", 1, 2),
    ]
    assert (found.only_a, found.only_b) == (["model.mask"], ["model.new"])
    assert found.forms == [("model.scale", "bfloat16 []", "float32 []")]
    assert {gap.name for gap in found.values} == {"model.a.weight", "model.b"}
    gap = found.values[0]
    assert (gap.differing, gap.numel) == (2, 77)
    assert gap.absolute == pytest.approx(4, rel=1e-6)
    assert gap.relative >= 1, "one of them is 0 there"
    assert sum(read) == to_read(folder, folder.parent / "b") == 2 * 308 + sizes(folder) + sizes(folder.parent / "b")
    back = compare(folder.parent / "b", folder)
    assert back.values == found.values


def test_what_is_not_a_number(folder: Path) -> None:
    one, other = tensors(), tensors()
    one["model.a.weight"][0, 0] = other["model.a.weight"][0, 0] = torch.nan
    one["model.a.weight"][1, 0], other["model.a.weight"][1, 0] = 0.0, -0.0
    for name, held in (("c", one), ("d", other)):
        store(folder.parent / name, held)
    assert compare(folder.parent / "c", folder.parent / "d").values[0][1:] == (0, 77, 0.0, 0.0), "the bits alone"
    other["model.a.weight"][5, 5] = torch.nan
    store(folder.parent / "e", other)
    gap = compare(folder.parent / "c", folder.parent / "e").values[0]
    assert gap.differing == 1
    assert gap.absolute != gap.absolute
