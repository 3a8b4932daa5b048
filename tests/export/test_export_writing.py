"""The same bytes from one process and from several ranks, in bounded memory, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import threading
import traceback
import tracemalloc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import adapted, checkpoint, contents, cut, stretches_of, tensors_in, tiny
from torch import nn

from unishard.checkpoint.export import destination, online, writing
from unishard.checkpoint.export.offline import export_checkpoint
from unishard.checkpoint.export.online import export
from unishard.distributed.lazy_shards import LazyShard
from unishard.distributed.on_ranks import Ranks
from unishard.errors import CheckpointError, RankMismatchError


def together(monkeypatch: pytest.MonkeyPatch, world: int, work: Callable[[int], Any]) -> list[Any]:
    """What ranks that are threads return or raise. An exchange that not all reach fails, and does not hang."""
    barrier, board, mine = threading.Barrier(world, timeout=20), [None] * world, threading.local()

    def gather(value: Any) -> list[Any]:
        board[mine.rank] = value
        barrier.wait()
        everyone = list(board)
        barrier.wait()
        return everyone

    monkeypatch.setattr(online, "ranks_of", lambda group: Ranks(mine.rank, world, gather))
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        mine.rank = rank
        try:
            results[rank] = work(rank)
        except Exception as error:  # the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Mixtral", "adapters"])
def test_ranks_write_the_bytes_that_one_process_writes_from_a_checkpoint(
    kind: str, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BLOCK", 44)
    model = adapted(tiny("Llama")) if kind == "adapters" else tiny(kind)
    options = {"dtype": "bf16", "max_shard_size": "3KB"}
    export_checkpoint(checkpoint(tmp_path / "here", model), tmp_path / "one", **options)
    everything = stretches_of(model)
    whole = tuple(name for name in everything if "norm" in name or "ln_" in name)
    parts = [cut(everything, rank, world, whole) for rank in range(world)]
    models = [deepcopy(model) for _ in range(world)]  # as of ranks: an export changes its modules while it reads them
    results = together(monkeypatch, world, lambda rank: export(tmp_path / "many", models[rank], parts[rank], **options))
    assert not [result for result in results if isinstance(result, Exception)]
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


def test_what_ranks_hold_in_common_is_divided_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(64, 64)
    written = [0, 0]

    def work(rank: int) -> None:
        def advance(count: int) -> None:
            written[rank] += count

        export(tmp_path / "out", model, stretches_of(model), advance=advance)

    assert together(monkeypatch, 2, work) == [None, None]
    assert written == [(64 * 64 + 64) * 2] * 2


def test_several_files_and_their_index_hold_what_one_file_holds(tmp_path: Path) -> None:
    model = tiny("Llama")
    folder = checkpoint(tmp_path / "here", model)
    export_checkpoint(folder, tmp_path / "one", "bf16")
    export_checkpoint(folder, tmp_path / "many", "bf16", "2KB")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    found = tensors_in(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    expected = tensors_in(tmp_path / "one")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    loaded = type(model).from_pretrained(tmp_path / "many")
    assert torch.equal(loaded.lm_head.weight, model.bfloat16().lm_head.weight)


def test_rounding_is_that_of_torch(tmp_path: Path) -> None:
    model = nn.Linear(4, 1, bias=False)
    ties = torch.tensor([[1 + 2**-8, 1 + 3 * 2**-8, float("nan"), -float("inf")]])  # between two values of bf16
    model.weight.data = ties
    export(tmp_path / "out", model, stretches_of(model), dtype="bf16")
    found = tensors_in(tmp_path / "out")["weight"]
    assert torch.equal(found, ties.bfloat16()) or (found.isnan() == ties.isnan()).all()
    assert found[0, :2].tolist() == [1.0, 1 + 2**-6]


def test_values_that_fp16_does_not_have_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, 70000.0]])
    with pytest.raises(CheckpointError, match=r"weight has values beyond 65504.*; export it as bf16 or fp32"):
        export(tmp_path / "out", model, stretches_of(model), dtype="fp16")
    assert list(tmp_path.iterdir()) == []


def full(*given: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_an_error_that_names_the_folder_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "here", tiny("Llama"))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        CheckpointError,
        match=r"/out/model\.safetensors: cannot be written \(No space left on device\); free disk space",
    ) as raised:
        export_checkpoint(folder, tmp_path / "out")
    assert "".join(traceback.format_exception(raised.value)).count("Traceback") == 1
    assert list(tmp_path.iterdir()) == [folder]


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)
    real, where = os.pwrite, threading.local()
    monkeypatch.setattr(os, "pwrite", lambda *given: full() if where.rank == 1 else real(*given))

    def work(rank: int) -> None:
        where.rank = rank
        export(tmp_path / "out", model, cut(stretches_of(model), rank, 3))

    errors = together(monkeypatch, 3, work)
    assert all(isinstance(error, CheckpointError) and "No space left on device" in str(error) for error in errors)
    (told,) = {str(error) for error in errors}
    assert told.startswith("rank 1: ")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_is_cut_short_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = nn.Linear(8, 8), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: real(descriptor, data[:7], at))
    export(tmp_path / "out", model, stretches_of(model))
    assert torch.equal(tensors_in(tmp_path / "out")["weight"], model.weight)


def test_what_stands_there_is_not_touched(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "out").mkdir()
    export(tmp_path / "out", model, stretches_of(model))
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"out exists and is not an empty folder; pass overwrite=True"):
        export(tmp_path / "out", model, stretches_of(model))
    assert contents(tmp_path) == before


def test_an_earlier_export_is_replaced_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all its files, also through a link; what fails at any point leaves the earlier one."""
    out, old, new = tmp_path / "out", nn.Linear(2, 2), nn.Linear(3, 3)
    export(out, old, stretches_of(old), max_shard_size=20)
    before = contents(tmp_path)
    real = Path.rename
    for name in ("out", ".tmp-out"):

        def fails(path: Path, target: Path, name: str = name) -> Path:
            if path.name.startswith(name):
                full()
            return real(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fails)
            with pytest.raises(CheckpointError, match="No space left on device"):
                export(out, new, stretches_of(new), overwrite=True)
        assert contents(tmp_path) == before
    (tmp_path / "link").symlink_to("out")
    export(tmp_path / "link", new, stretches_of(new), overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert torch.equal(tensors_in(out)["weight"], new.weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
@pytest.mark.parametrize("rename", [1, 2, 3])
def test_a_killed_export_leaves_one_of_both_and_the_next_cleans_up(rename: int, tmp_path: Path) -> None:
    """Killed just before this rename: of the folder, of the draft, of what was replaced."""
    sources = [checkpoint(tmp_path / f"checkpoint-{kind}", tiny(kind)) for kind in ("Llama", "GPT2")]
    out, wanted = tmp_path / "exports" / "out", []
    for number, source in enumerate(sources):
        export_checkpoint(source, tmp_path / str(number))
        wanted.append(contents(tmp_path / str(number)))
    export_checkpoint(sources[0], out)
    if (child := os.fork()) == 0:
        left = rename

        def count(event: str, _: Any) -> None:
            nonlocal left
            left -= event == "os.rename"
            if not left:
                os._exit(9)

        sys.addaudithook(count)
        try:
            export_checkpoint(sources[1], out, overwrite=True)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        export_checkpoint(sources[1], out)
    there = contents(out)
    there.pop(".owner", None)
    assert there == wanted[rename == 3]
    export_checkpoint(sources[1], out, overwrite=True)
    assert contents(out) == wanted[1]
    assert os.listdir(out.parent) == ["out"]


def test_an_export_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    draft = destination.begin(tmp_path / "out")
    (tmp_path / ".old-out-01234567").mkdir()
    destination.clean(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([draft.name, ".old-out-01234567"])


@pytest.mark.parametrize(
    ("name", "what"),
    [("notes", "no folder of an earlier export"), ("file", "is not a folder"), (".", "no folder of an")],
)
def test_what_is_no_export_is_never_replaced(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    export(tmp_path / "here", model, stretches_of(model))
    monkeypatch.chdir(tmp_path / "here")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=what):
        export(name if name == "." else tmp_path / name, model, stretches_of(model), overwrite=True)
    assert contents(tmp_path) == before


def test_elements_that_nobody_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)
    parts = cut(stretches_of(model), 0, 3), cut(stretches_of(model), 2, 3)
    errors = together(monkeypatch, 2, lambda rank: export(tmp_path / "out", model, parts[rank]))
    assert all(re.search(r"no rank holds element 3 of bias; every rank", str(error)) for error in errors), errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("others", [{"dtype": "bf16"}, {"max_shard_size": 10}])
def test_ranks_that_ask_for_different_exports_are_told(
    others: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(8, 8)
    errors = together(
        monkeypatch, 2, lambda rank: export(tmp_path / "out", model, stretches_of(model), **(others if rank else {}))
    )
    assert all(isinstance(error, RankMismatchError) and "rank 1 plans other files" in str(error) for error in errors), (
        errors
    )
    assert list(tmp_path.iterdir()) == []


def test_memory_is_that_of_a_few_blocks_and_each_element_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BLOCK", 1 << 16)
    model = nn.Linear(1024, 1024, bias=False)
    given, read = stretches_of(model)["weight"], []

    def counted(begin: int, end: int) -> torch.Tensor:
        read.append((begin, end))
        return given.read(begin, end)

    tracemalloc.start()
    export(
        tmp_path / "out",
        model,
        {"weight": LazyShard(given.shape, given.dtype, given.start, given.end, counted)},
        dtype="bf16",
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(end - begin for begin, end in read) * 4 <= 1 << 16
    assert [element for pair in read for element in pair][1:-1:2] == [element for pair in read for element in pair][
        2::2
    ]
    assert (read[0][0], read[-1][1]) == (0, 1024 * 1024)
    assert peak < 1 << 20
