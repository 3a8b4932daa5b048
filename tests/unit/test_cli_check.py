"""What `unishard check` refuses, and what it says of a config that passes. `tests/ranks/test_check.py` compares it with
`prepare`."""

from __future__ import annotations

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
