"""Files that are not there, are damaged or are no files, and disks that not all nodes share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from playing import checked as config
from playing import prepare
from torch import nn

import unishard
from mistakes.mistake import Mistakes
from unishard.checkpoint import finding, shared_folder
from unishard.testing.models import mlp

DAMAGE = Mistakes("Files and disks")

OWN_DISK = "/proc/self/cwd/checkpoints"
"""One path, and another folder for each process."""


@contextmanager
def own_disk() -> Iterator[Path]:
    """A working directory of this rank alone."""
    before = Path.cwd()
    with TemporaryDirectory() as folder, patch.object(shared_folder, "_PATIENCE", 0.1):
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


@DAMAGE.raises(
    "the same with `async_save: true`: at the next save",
    "CheckpointError: /proc/self/cwd/checkpoints: not the same folder on all ranks: rank 1...checkpoint.dir must be on "
    "a disk...",
    True,
)
@DAMAGE.raises(
    "`checkpoint.dir` on a disk of each node",
    "CheckpointError: /proc/self/cwd/checkpoints: not the same folder on all ranks: rank 1 on ... cannot read what "
    "rank 0 on ... wrote there (No such file or directory); checkpoint.dir must be on a disk that all nodes share",
    False,
)
def checkpoints_on_a_disk_of_each_node(backend, in_background):
    with own_disk() as disk:
        engine = prepare(config(backend, checkpoint={"dir": OWN_DISK, "async_save": in_background}))
        try:
            engine.save()
            engine.save()
        finally:
            engine.close()
            assert finding.latest(disk / "checkpoints") is None
            assert set(finding.entries(disk / "checkpoints")) <= {".owner"}  # the lease of rank 0


@DAMAGE.raises(
    "`engine.export` into a folder on a disk of each node",
    "CheckpointError: /proc/self/cwd/out: not the same folder on all ranks: rank 1 on ... cannot read what rank 0 on "
    "... wrote there...",
)
def export_to_a_disk_of_each_node(backend):
    with own_disk() as disk, prepare(config(backend)) as engine:
        try:
            engine.export("/proc/self/cwd/out")
        finally:
            assert list(disk.iterdir()) == []


@DAMAGE.raises(
    "a sparse buffer, or one of a dtype that torch cannot copy, such as `uint4`",
    "ModelError: mask of Mlp is torch.sparse_coo, which can be neither sent to other ranks nor saved; make it a dense "
    "tensor of another dtype, or keep it as a plain attribute of its module",
    "sparse",
)
@DAMAGE.raises(
    "`nn.Parameter(codes_in_uint4, requires_grad=False)`",
    "ModelError: mask of Mlp is torch.uint4, which can be...",
    "uint4",
)
def model_that_cannot_be_saved(backend, kind):
    model = mlp()
    if kind == "sparse":
        model.register_buffer("mask", torch.eye(3).to_sparse())
    else:
        model.mask = nn.Parameter(torch.empty(3, dtype=torch.uint4), requires_grad=False)
    unishard.prepare(model, config(backend))


@DAMAGE.raises(
    '`engine.save(state={"mask": sparse})`',
    "CheckpointError: rank 0: state.mask is torch.sparse_coo, which cannot be saved; save a dense tensor of another "
    "dtype instead...",
)
def state_that_cannot_be_saved(backend):
    with own_disk() as disk, prepare(config(backend)) as engine:
        try:
            engine.save(OWN_DISK, state={"mask": torch.eye(3).to_sparse()})
        finally:
            assert list(disk.iterdir()) == []


DAMAGE.elsewhere(
    "`unishard checkpoint diff` with a damaged checkpoint",
    "CheckpointError: ...__0_0.distcp: has CRC-32 ... instead of ...; use another checkpoint (unishard checkpoint list "
    "...)",
    "tests/checkpoint/test_verifying.py::test_a_damaged_checkpoint_is_not_compared",
)
DAMAGE.elsewhere(
    "`unishard checkpoint convert` of a damaged checkpoint, also of another tool",
    "CheckpointError: ...: model.weight is damaged: its hash differs from the manifest; use another checkpoint",
    "tests/checkpoint/formats/test_converting.py::test_of_a_checkpoint_of_ours",
)
DAMAGE.elsewhere(
    "a manifest with nonsense, such as `world_size: 0` or a shape of `[-7, 11]`",
    "CheckpointError: .../manifest.json: tensors.model.a.weight.shape: is not the shape of a tensor; the file is "
    "damaged, or was written by a later version of unishard",
    "tests/checkpoint/test_manifest.py::test_a_nonsense_manifest_is_one_error_that_names_the_field",
)
DAMAGE.elsewhere(
    "a pipe in place of a file of a checkpoint",
    "CheckpointError: ... (manifest.json: not a file but a pipe, a socket or a device); run `unishard checkpoint list`",
    "tests/checkpoint/test_manifest.py::test_a_pipe_in_place_of_a_file_is_an_error_and_keeps_nobody_waiting",
)
DAMAGE.elsewhere(
    "a pipe without a writer in place of a config",
    "ConfigError: ...: is an empty pipe; name a YAML file, or start the writer of the pipe first",
    "tests/unit/test_loading.py::test_a_pipe_is_read_and_an_empty_one_is_refused",
)
