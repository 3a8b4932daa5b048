"""Small checkpoints for the tests: real ones of a few tensors, and ones of which only the directory matters."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unishard.checkpoint import directory, finding
from unishard.checkpoint.hashing import hexadecimal
from unishard.checkpoint.manifest import FileFacts, Manifest, ModelRecord, TensorFacts
from unishard.checkpoint.writing import write
from unishard.distributed.lazy_shards import lazy_shard_of
from unishard.distributed.shards import Shard

MODEL = ModelRecord(class_name="Tiny", fingerprint="0" * 16, numel=81)


def tensors(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "model.a.weight": torch.randn(7, 11, generator=random),
        "model.scale": torch.tensor(2.5, dtype=torch.bfloat16),
        "model.mask": torch.tensor([True, False, True]),
        "optim.state.a.weight.exp_avg": torch.randn(7, 11, generator=random),
        "optim.state.a.weight.step": torch.tensor(3.0),
        "rng.rank00000.cpu": torch.arange(16, dtype=torch.uint8),
    }


def stamp(step: int) -> str:
    """When a checkpoint of a step was written: later steps later."""
    return f"2026-01-01T{step // 60:02}:{step % 60:02}:00+00:00"


def store(folder: Path, held: dict[str, Tensor] | None = None, step: int = 30, **facts: Any) -> Manifest:
    """Write a real checkpoint into a folder."""
    held = tensors() if held is None else held
    written = write(
        folder, {name: lazy_shard_of(Shard(value.shape, value)) for name, value in held.items()}, ties={"b": "a.weight"}
    )
    assert written is not None
    said = {
        "written": stamp(step),
        "versions": {"unishard": "0.1.0", "torch": "2.13.0"},
        "step": step,
        "world_size": 2,
        "config": {"backend": "fsdp", "sharding": {"strategy": "full_shard"}, "training": {"seed": 1}},
        "model": MODEL,
        "ties": {"b": "a.weight"},
        "buffers": ["mask"],
        "norms": {"parameters": 8.5, "exp_avg": 0.25},
        "files": {name: FileFacts(bytes=size, crc32=f"{crc:08x}") for name, (size, crc) in written.files.items()},
        "tensors": {
            name: TensorFacts(shape=list(shape), dtype=written.dtypes[name], hash=hexadecimal(written.hashes[name]))
            for name, shape in written.shapes.items()
        },
    }
    manifest = Manifest(**(said | facts))
    directory.write_manifest(folder, manifest)
    return manifest


def save(
    root: Path,
    step: int,
    content: bytes = b"",
    keep_last: int | None = None,
    written: str = "",
    run: str = "",
    names: Sequence[str] = ("one", "two"),
    **facts: Any,
) -> Path:
    """Save as rank 0 does, with small files in place of the tensors; as earlier versions did, where no run is
    named."""
    directory.clean(root)
    beside = run if any(found.name == finding.name_of(step) for found in finding.checkpoints(root)) else ""
    folder = directory.begin(root, step, beside)
    for name in names:
        (folder / name).write_bytes(content)
    files = {name: FileFacts(bytes=len(content), crc32=f"{zlib.crc32(content):08x}") for name in names}
    said = facts | ({"run": run, "commit": finding.next_commit(root)} if run else {})
    manifest = Manifest(
        written=written or stamp(step),
        versions={},
        step=step,
        world_size=1,
        model=MODEL,
        files=files,
        tensors={},
        **said,
    )
    directory.write_manifest(folder, manifest)
    committed = directory.commit(folder, root, step, beside)
    directory.prune(root, keep_last, None, committed)
    return committed
