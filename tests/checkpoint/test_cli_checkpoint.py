"""What a person sees of checkpoints on the command line."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stored import save, store, tensors
from typer.testing import CliRunner, Result

from unishard.cli import app
from unishard.cli import checkpoint as commands
from unishard.cli.bar import bar
from unishard.cli.checkpoint_facts import size
from unishard.contract.training_facts import GroupRecord, LossScaleFacts, OptimizerFacts, ScheduleFacts

DATA = "__0_0.distcp"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], prog_name="unishard")


def cells(result: Result) -> list[list[str]]:
    return [re.split(r"  +", line) for line in result.stdout.splitlines()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TZ", "UTC")
    store(tmp_path / "step-00000020", step=20)
    store(
        tmp_path / "step-00000030",
        optimizer=OptimizerFacts(
            class_name="AdamW",
            groups=[
                GroupRecord(names=["a.weight"], options={"lr": 0.001, "weight_decay": 0.1, "foreach": None}),
                GroupRecord(names=["scale"], options={"lr": 0.002, "weight_decay": 0.0}),
            ],
        ),
        schedule=ScheduleFacts(updates=29),
        loss_scale=LossScaleFacts(value=1024.0, made=7),
        data=[{"epoch": 1, "seen": 640}, {}],
        state={"note": "mine"},
    )
    (tmp_path / "latest").write_text("step-00000030\n")
    return tmp_path


def test_list(root: Path) -> None:
    (root / f".tmp-step-00000040-{'0' * 32}").mkdir()
    (root / f".tmp-step-00000040-{'0' * 32}" / "half").write_bytes(bytes(1500))
    (root / "step-00000010").mkdir()
    (root / "step-00000010" / "manifest.json").write_text("{")
    result = run("list", root)
    assert (result.exit_code, result.stderr) == (0, "")
    header, damaged, one, latest, left = cells(result)
    assert header == ["step", "written", "ranks", "backend", "strategy", "size", "state"]
    assert damaged == ["10", "1 B", "manifest is damaged"]
    assert one[0] == "20"
    assert latest[0] == "30"
    assert latest[2:5] == ["2", "fsdp", "full_shard"]
    assert (one[-1], latest[-1]) == ("complete", "complete, latest")
    assert left == ["40", "1.5 kB", f"incomplete: .tmp-step-00000040-{'0' * 32}"]
    found = json.loads(run("list", root, "--json").stdout)
    assert [(each["step"], each["state"], each["latest"]) for each in found] == [
        (10, "manifest is damaged", False),
        (20, "complete", False),
        (30, "complete", True),
        (40, "incomplete", False),
    ]
    on_disk = sum(path.stat().st_size for path in (root / "step-00000030").iterdir())
    assert (found[2]["bytes"], found[2]["world_size"], found[2]["backend"]) == (on_disk, 2, "fsdp")


def test_list_of_several_runs_with_metrics(tmp_path: Path) -> None:
    """Columns for what there is."""
    save(tmp_path, 10, run="a" * 8, metric=0.30999999493360519)
    assert cells(run("list", tmp_path))[0][3:] == ["backend", "strategy", "metric", "size", "state"]
    save(tmp_path, 10, run="b" * 8)
    header, one, other = cells(run("list", tmp_path))
    assert header[3:] == ["backend", "strategy", "run", "metric", "size", "state"]
    assert (one[3:5], one[-1]) == (["a" * 8, "0.31"], "complete")
    assert (other[3], other[-1]) == ("b" * 8, "complete, latest")
    assert [each["metric"] for each in json.loads(run("list", tmp_path, "--json").stdout)] == [
        0.30999999493360519,
        None,
    ]
    facts = dict(row[:2] for row in cells(run("inspect", tmp_path / "step-00000010")) if len(row) > 1)
    assert (facts["run"], facts["metric"]) == ("aaaaaaaa, commit 1 of its directory", "0.3099999949336052")


def test_list_of_nothing(tmp_path: Path) -> None:
    assert run("list", tmp_path).stdout == f"no checkpoints in {tmp_path}\n"
    assert json.loads(run("list", tmp_path, "--json").stdout) == []


def test_a_converted_checkpoint_is_listed(tmp_path: Path) -> None:
    store(tmp_path / "step-00000030", config=None, written="some day")
    assert cells(run("list", tmp_path))[1][:3] == ["30", "some day", "2"]
    assert "unknown (converted checkpoint)" in run("inspect", tmp_path).stdout


def test_inspect(root: Path) -> None:
    result = run("inspect", root)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = cells(result)
    shown = {row[0]: row[1:] for row in reversed(rows)}
    assert shown["checkpoint"] == [str(root / "step-00000030")]
    assert shown["step"] == ["30"]
    assert shown["versions"] == ["unishard 0.1.0, torch 2.13.0"]
    assert shown["backend"] == ["fsdp, full_shard"]
    assert shown["model"] == ["Tiny, 81 parameters, fingerprint 0000000000000000"]
    assert shown["ties"] == ["1"]
    assert shown["optimizer"] == ["AdamW, 2 groups"]
    assert shown["schedule"] == ["29 updates"]
    assert shown["loss scale"] == ["1024, 7 updates since it changed"]
    assert shown["data"] == ["of 2 ranks; the first: {epoch: 1, seen: 640}"]
    assert ["buffers", "1", "3", "3 B", "bool"] in rows
    assert shown["random numbers"] == ["1", "16", "16 B", "uint8"]
    assert ["parameters", "2", "78", "310 B", "bfloat16 float32"] in rows, "the tie is counted once"
    assert ["exp_avg", "1", "77", "308 B", "float32"] in rows
    assert ["exp_avg", "0.25"] in rows
    assert ["0", "1", "0.001", "weight_decay=0.1"] in rows
    assert ["1", "1", "0.002", "weight_decay=0.0"] in rows
    assert "model.a.weight" not in result.stdout


def test_inspect_each_tensor(root: Path) -> None:
    result = run("inspect", root / "step-00000020", "--tensors")
    said = json.loads(run("inspect", root / "step-00000020", "--tensors", "--json").stdout)
    rows = cells(result)
    for name, value in tensors().items():
        facts = said["tensors"][name]
        assert facts["shape"] == list(value.shape)
        assert [name, str(list(value.shape)), str(value.dtype).removeprefix("torch."), facts["hash"]] in rows
    assert said["step"] == 20
    brief = json.loads(run("inspect", root, "--json").stdout)
    assert "tensors" not in brief
    assert {kind["name"]: kind["numel"] for kind in brief["kinds"]}["exp_avg"] == 77


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_inspect_a_directory_of_torch(tmp_path: Path) -> None:
    dcp.save({"model": {"a": torch.zeros(3, 4)}, "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    result = run("inspect", tmp_path)
    assert result.exit_code == 0
    assert "make it a unishard checkpoint with `unishard checkpoint convert`" in result.stdout
    assert ["model.a", "[3, 4]", "float32"] in cells(result)
    assert re.search(r"^step +pickle, not opened$", result.stdout, re.MULTILINE)
    said = json.loads(run("inspect", tmp_path, "--json").stdout)
    assert said["tensors"] == {"model.a": {"shape": [3, 4], "dtype": "float32"}}
    assert said["pickles"] == ["step"]


@pytest.mark.parametrize("options", [(), ("--bits",)])
def test_verify_what_is_sound(root: Path, options: tuple[str, ...]) -> None:
    result = run("verify", root, *options)
    also = " and 7 tensors" if options else ""
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{root}/step-00000030: ok; 2 files{also} match the manifest\n"


def test_verify_names_what_is_damaged(root: Path) -> None:
    folder = root / "step-00000030"
    data = bytearray((folder / DATA).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / DATA).write_bytes(data)
    (folder / ".metadata").write_bytes(b"short")
    result = run("verify", root, "--bits")
    assert (result.exit_code, result.stderr) == (1, "")
    one, other = result.stdout.splitlines()
    assert re.fullmatch(rf"{folder}/{DATA}: has CRC-32 \w{{8}} instead of \w{{8}}", one)
    assert re.fullmatch(rf"{folder}/\.metadata: has 5 bytes instead of \d+", other)


def test_verify_names_a_tensor(root: Path) -> None:
    path = root / "step-00000030" / "manifest.json"
    said = json.loads(path.read_text())
    said["tensors"]["model.mask"]["hash"] = "0" * 16
    del said["crc32"]
    path.write_text(json.dumps(said))
    assert run("verify", root).exit_code == 0
    result = run("verify", root, "--bits")
    assert result.exit_code == 1
    assert "model.mask has hash" in result.stdout


def test_verify_names_a_manifest(root: Path) -> None:
    (root / "step-00000030" / "manifest.json").write_text("{")
    result = run("verify", root)
    assert (result.exit_code, result.stderr) == (1, "")
    assert f"{root}/step-00000030/manifest.json: " in result.stdout


def test_diff_of_equals(root: Path) -> None:
    store(root / "b", step=20)
    result = run("diff", root / "step-00000020", root / "b")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "equal: 7 tensors, and all metadata\n", "")


def test_diff_of_a_damaged_one(root: Path) -> None:
    path = root / "step-00000030" / DATA
    path.write_bytes(path.read_bytes() + b"x")
    result = run("diff", root / "step-00000020", root)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{path}: has " in result.stderr


def test_diff(root: Path) -> None:
    other = tensors()
    other["model.scale"] += 0.5
    other.pop("model.mask")
    store(root / "b", other, step=20, world_size=4)
    result = run("diff", root / "step-00000020", root / "b")
    assert (result.exit_code, result.stderr) == (1, "")
    assert cells(result) == [
        ["what", "A", "B"],
        ["world_size", "2", "4"],
        ["model.mask", "present", "missing"],
        [""],
        ["tensor", "elements that differ", "largest difference", "relative"],
        ["model.scale", "1 of 1", "0.5", "0.167"],
        [""],
        ["5 of 6 common tensors are equal"],
    ]


@pytest.mark.parametrize("command", ["list", "inspect", "verify", "diff"])
@pytest.mark.parametrize("where", ["nowhere", "file", "empty", "begun", "hostile"])
def test_a_wrong_path_is_one_message(command: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / f".tmp-step-00000040-{'0' * 32}").mkdir(parents=True)
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch flag'\ntR.")
    result = run(command, *[tmp_path / where] * (2 if command == "diff" else 1))
    if command == "list" and where in ("empty", "begun", "hostile"):
        assert result.exit_code == 0
        return
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(str(tmp_path / where))


def test_one_checkpoint_is_no_folder_of_them(root: Path) -> None:
    result = run("list", root / "step-00000030")
    assert result.exit_code == 2
    assert "is a single checkpoint; name its parent directory" in result.stderr


@pytest.mark.parametrize(("columns", "drawn"), [(40, False), (200, True)])
def test_on_a_terminal(root: Path, monkeypatch: pytest.MonkeyPatch, columns: int, drawn: bool) -> None:
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", screen)
    commands.list_(root)
    assert ("│" in screen.getvalue()) is drawn
    commands.inspect(root, tensors=True)
    assert "model.a.weight" in screen.getvalue().replace("\n", "")


def test_the_bar_is_for_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for screen in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", screen)
        with bar("files", 100) as advance:
            advance(100)
        assert ("files" in screen.getvalue()) is screen.isatty()


def test_sizes() -> None:
    assert [size(count) for count in (0, 999, 1000, 1_273_000_000, 5 * 10**12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.27 GB",
        "5 TB",
    ]
