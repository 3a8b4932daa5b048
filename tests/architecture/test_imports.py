"""Loading, translating and explaining a config imports neither torch nor an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ["torch", "deepspeed", "transformers", "torchdata", "numpy"]


def imported(code: str, names: list[str]) -> list[str]:
    """Which of these packages a fresh interpreter holds after this code."""
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nimport sys; print([n for n in {names!r} if n in sys.modules], file=sys.stderr)",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    last = result.stderr.splitlines()[-1]
    found: list[str] = eval(last, {"__builtins__": {}})
    return found


def command(*arguments: str) -> str:
    return f"from unishard.cli import app\napp({list(arguments)!r}, standalone_mode=False)"


@pytest.mark.parametrize("backend", ["fsdp", "deepspeed"])
def test_explain_native(backend: str) -> None:
    assert imported(command("explain", "configs/llama_tiny.yaml", backend, "--native"), HEAVY) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "configs/llama_tiny.yaml"],
        ["check", "configs/zero2_bf16.yaml"],
        ["schema"],
        ["plan", "--help"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_other_commands(arguments: list[str]) -> None:
    assert imported(command(*arguments), HEAVY) == []


@pytest.mark.parametrize("verb", ["list", "inspect"])
def test_looking_at_checkpoints(verb: str, tmp_path: Path) -> None:
    from unishard.checkpoint.manifest import Manifest, ModelRecord

    model = ModelRecord(class_name="M", fingerprint="", numel=0)
    facts = Manifest(written="", versions={}, step=1, world_size=1, model=model, files={}, tensors={})
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "manifest.json").write_text(facts.model_dump_json())
    assert imported(command("checkpoint", verb, str(tmp_path)), HEAVY) == []


def test_the_package_alone() -> None:
    assert imported("import unishard", [*HEAVY, "typer", "rich", "unishard_fsdp", "unishard_deepspeed"]) == []


@pytest.mark.parametrize("format_", ["unishard", "deepspeed"])
def test_translate(format_: str) -> None:
    assert imported(command("translate", "configs/llama_tiny.yaml", "--to", format_), HEAVY) == []


def test_a_table_that_is_not_drawn_needs_no_rich() -> None:
    assert imported(command("translate", "configs/llama_tiny.yaml", "--to", "unishard"), ["rich"]) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["examples/configs/ds_zero2.json", "--to", "unishard"],
        ["examples/configs/accelerate_fsdp.yaml", "--to", "hf"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_translation_imports_the_tables_that_it_uses(arguments: list[str]) -> None:
    """Every module counts: a translation takes about 0.2 seconds of CPU, most of them for imports."""
    unused = [
        *(
            "unishard.engine",
            "unishard.contract.private_api",
            "unishard.contract.backend",
        ),
        *(
            "unishard_fsdp.options",
            "unishard_fsdp.private",
            "unishard_deepspeed.private",
            "unishard.formats.lightning.format",
        ),
        *("unishard.formats.llamafactory.format", "unishard.formats.trl.format", "tomllib", "rich"),
    ]
    assert imported(command("translate", *arguments), unused) == []


def test_the_check_finds_what_it_looks_for() -> None:
    assert imported("import torch", HEAVY)[:1] == ["torch"]
