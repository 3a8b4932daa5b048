"""Files that are not there, are damaged or are no files, and disks that not all nodes share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from harness import checked as config
from harness import prepare
from torch import nn

import unishard
from mistakes.mistake import elsewhere, mistake
from unishard.checkpoint import finding, shared_folder
from unishard.testing.models import mlp

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


@mistake("`checkpoint.dir` on a disk of each node with `async_save: true`: at the next save", True)
@mistake("`checkpoint.dir` on a disk of each node", False)
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


@mistake("`engine.export` into a folder on a disk of each node")
def export_to_a_disk_of_each_node(backend):
    with own_disk() as disk, prepare(config(backend)) as engine:
        try:
            engine.export("/proc/self/cwd/out")
        finally:
            assert list(disk.iterdir()) == []


@mistake("a sparse buffer, or one of a dtype that torch cannot copy, such as `uint4`", "sparse")
@mistake("`nn.Parameter(codes_in_uint4, requires_grad=False)`", "uint4")
def model_that_cannot_be_saved(backend, kind):
    model = mlp()
    if kind == "sparse":
        model.register_buffer("mask", torch.eye(3).to_sparse())
    else:
        model.mask = nn.Parameter(torch.empty(3, dtype=torch.uint4), requires_grad=False)
    unishard.prepare(model, config(backend))


@mistake('`engine.save(state={"mask": sparse})`')
def state_that_cannot_be_saved(backend):
    with own_disk() as disk, prepare(config(backend)) as engine:
        try:
            engine.save(OWN_DISK, state={"mask": torch.eye(3).to_sparse()})
        finally:
            assert list(disk.iterdir()) == []


elsewhere(
    "`unishard checkpoint diff` with a damaged checkpoint",
    "tests/checkpoint/test_verifying.py::test_a_damaged_checkpoint_is_not_compared",
)
elsewhere(
    "`unishard checkpoint convert` of a damaged checkpoint, also of another tool",
    "tests/checkpoint/formats/test_converting.py::test_of_a_checkpoint_of_ours",
)
elsewhere(
    "a manifest with nonsense, such as `world_size: 0` or a shape of `[-7, 11]`",
    "tests/checkpoint/test_manifest.py::test_a_nonsense_manifest_is_one_error_that_names_the_field",
)
elsewhere(
    "a pipe in place of a file of a checkpoint",
    "tests/checkpoint/test_manifest.py::test_a_pipe_in_place_of_a_file_is_an_error_and_keeps_nobody_waiting",
)
elsewhere(
    "a pipe without a writer in place of a config",
    "tests/unit/test_loading.py::test_a_pipe_is_read_and_an_empty_one_is_refused",
)
