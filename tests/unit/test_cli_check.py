"""What `unishard check` refuses, and what it says of a config that passes. `tests/ranks/test_check.py` compares it with
`prepare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import ROOT, run

import unishard
from unishard.checkpoint.manifest import Manifest, ModelRecord
from unishard.contract import registry

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def problems(text: str, *arguments: str) -> list[str]:
    """The lines on stderr for a config that is refused; none for one that is not."""
    Path("c.yaml").write_text(text)
    result = run("check", "c.yaml", *arguments)
    assert result.exit_code == (1 if result.stderr and not result.stdout else 0), result.output
    return [] if result.stdout else result.stderr.splitlines()


def checkpoint(root: str, step: int) -> Path:
    """A checkpoint of another run, as far as its manifest goes."""
    folder = Path(root) / f"step-{step:08d}"
    folder.mkdir(parents=True)
    model = ModelRecord(class_name="M", fingerprint="", numel=0)
    facts = Manifest(written="", versions={}, step=step, world_size=1, model=model, files={}, tensors={})
    (folder / "manifest.json").write_text(facts.model_dump_json())
    return folder


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_our_configs_pass_on_both_engines(path: Path) -> None:
    for backend in unishard.available():
        result = run("check", str(path), "--world-size", "4", "--set", f"backend={backend}")
        assert (result.exit_code, result.stdout) == (0, f"{path}: ok for {backend} on 4 ranks\n")


def test_everything_at_once_with_its_line(config: Path) -> None:
    Path("file").touch()
    text = """backend: deepspeed
sharding: {strategy: hybrid_shard, group_size: 4}
training: {global_batch_size: 10, micro_batch_size: 2}
compile: {mode: full, backend: nothing}
checkpoint: {dir: file/checkpoints}
native: {deepspeed: {zero_optimization: {stage: 2}}, horovod: {}}
"""
    assert [line.partition(";")[0] for line in problems(text, "--world-size", "6")] == [
        "c.yaml:2: sharding.group_size: is 4, which does not divide 6 ranks",
        "c.yaml:3: training.global_batch_size: is 10, but micro_batch_size 2 x gradient_accumulation_steps 1 x 6 ranks "
        "is 12",
        "c.yaml:4: compile.backend: torch has no backend 'nothing'",
        f"c.yaml:5: checkpoint.dir: {config.parent}/file/checkpoints: cannot be read (Not a directory)",
        "c.yaml:6: native.horovod: no backend named 'horovod'",
        "c.yaml:6: native.deepspeed.zero_optimization.stage: is decided by a field",
    ]


def test_what_load_refuses_is_said_as_load_says_it(config: Path) -> None:
    said = problems("lr: 1\ntraining: {seed: -1}\n")
    with pytest.raises(unishard.ConfigError) as raised:
        unishard.load("c.yaml")
    assert "\n".join(said) == str(raised.value)
    assert run("check", "none.yaml").stderr == "none.yaml: file not found; did you mean 'c.yaml'?\n"
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}, "fp16": {"enabled": true}}')
    assert "translate it first: unishard translate ds.json --to unishard" in run("check", "ds.json").stderr


def test_the_packages_of_the_engine(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unishard_deepspeed import oldest

    monkeypatch.setattr(oldest, "version_of", lambda package: "0.18.0")
    (line,) = problems("# mine\nbackend: deepspeed\n")
    assert line.startswith("c.yaml:2: backend: backend deepspeed needs deepspeed>=0.19.8; 0.18.0 is installed")
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert problems("# mine\nbackend: deepspeed\n") == [
        "c.yaml:2: backend: 'deepspeed' needs packages that are not installed; pip install 'unishard[torch,deepspeed]'"
    ]


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("training: {micro_batch_size: 4, global_batch_size: 32}", (), "8 ranks, as training.global_batch_size says"),
        ('launch: {nodes: "1:2", processes_per_node: 4}', (), "8 ranks (2 nodes), as launch says"),
        ("sharding: {strategy: hybrid_shard, group_size: 4}", (), "4 ranks, as sharding.group_size says"),
        ("sharding: full_shard", (), "1 rank; add --world-size N to check it for more"),
        ("sharding: full_shard", ("--gpus-per-node", "2", "--world-size", "4"), "4 ranks (2 nodes)"),
        ("launch: {nodes: 2, processes_per_node: 4}", ("--gpus-per-node", "8"), "16 ranks (2 nodes)"),
        ("launch: {nodes: 2, processes_per_node: 4}", ("--world-size", "16"), "16 ranks (4 nodes)"),
        (
            "launch: {nodes: 2}\ntraining: {global_batch_size: 8}",
            (),
            "8 ranks (2 nodes), as training.global_batch_size says",
        ),
        ("launch: {nodes: 2}", (), "2 ranks (2 nodes), as launch.nodes says"),
    ],
)
def test_the_number_of_ranks_is_the_one_that_the_config_implies(
    config: Path, text: str, arguments: tuple[str, ...], said: str
) -> None:
    config.write_text(text)
    result = run("check", "c.yaml", *arguments)
    assert (result.exit_code, result.stdout) == (0, f"c.yaml: ok for fsdp on {said}\n")


def test_a_global_batch_that_no_number_of_ranks_gives(config: Path) -> None:
    assert problems(
        "training: {micro_batch_size: 4, global_batch_size: 10}\nsharding: {strategy: hybrid_shard, group_size: 2}\n"
    ) == [
        "c.yaml:1: training.global_batch_size: is 10, but each rank adds micro_batch_size 4 x "
        "gradient_accumulation_steps 1 = 4 samples; write a multiple of 4, such as 8, or remove it"
    ]


def test_checkpoints_that_are_there(config: Path) -> None:
    newest = checkpoint("runs", 4)
    config.write_text("checkpoint: {dir: runs, every_steps: 2}\n")
    result = run("check", "c.yaml")
    assert result.exit_code == 0, "the script may load it"
    assert result.stderr.startswith(
        f"note: checkpoint.dir: {newest.absolute().parent}: holds checkpoints of another run, the newest of step 4"
    )
    config.write_text("checkpoint: {dir: runs, every_steps: 2, on_existing: new}\n")
    assert run("check", "c.yaml").stderr == ""
    config.write_text("checkpoint: {dir: runs, every_steps: 2, on_existing: resume}\n")
    assert run("check", "c.yaml").stderr == f"note: checkpoint.on_existing: the run resumes from {newest.absolute()}\n"
    (newest / "manifest.json").write_text("{")
    (line,) = problems(config.read_text())
    assert line.startswith(f"c.yaml:1: checkpoint.on_existing: {newest.absolute()}/manifest.json: ")


def test_a_directory_of_checkpoints_that_cannot_be_written(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != config.parent)
    (line,) = problems("checkpoint: deep/runs\n")
    said = "cannot create a checkpoint here (Permission denied); choose a writable folder"
    assert line == f"c.yaml:1: checkpoint.dir: {config.parent}/deep/runs: {said}"


def test_what_is_approximate_is_a_note(config: Path) -> None:
    config.write_text("backend: deepspeed\nnative: {deepspeed: {zero_optimization: {zero_quantized_weights: true}}}\n")
    result = run("check", "c.yaml")
    assert result.exit_code == 0
    assert result.stderr.startswith(
        "note: native.deepspeed.zero_optimization.zero_quantized_weights: true is only approximate on deepspeed: "
    )


def test_as_json(config: Path) -> None:
    config.write_text("training: {micro_batch_size: 4, global_batch_size: 32}\n")
    result = run("check", "c.yaml", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (
        0,
        {"file": "c.yaml", "ok": True, "backend": "fsdp", "world_size": 8, "problems": [], "notes": []},
    )
    config.write_text("lr: 1\n")
    result = run("check", "c.yaml", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    assert json.loads(result.stdout) == {
        "file": "c.yaml",
        "ok": False,
        "problems": [{"path": "lr", "what": "unknown field; did you mean 'optimizer.lr'?", "where": "c.yaml:1"}],
        "notes": [],
    }
