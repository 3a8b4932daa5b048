"""What stands under a root, whenever a run is killed, and what is found there."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stored import save, stamp

from unishard.checkpoint import directory, finding, manifest
from unishard.checkpoint.files import path_of
from unishard.checkpoint.verifying import damaged
from unishard.errors import CheckpointError, ContractError

FORMER = (10, 20, 30)
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
KILLED = 9


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed loses nothing that it has written; only a machine without power does."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def former(root: Path) -> Path:
    for step in FORMER:
        save(root, step, b"old")
    return root


def steps(root: Path) -> list[int]:
    return [found.step for found in finding.checkpoints(root)]


def content(folder: Path) -> bytes:
    """Of a checkpoint that is whole: its files are those of its manifest, and of one save."""
    assert damaged(folder, manifest.read(folder)) == []
    (one,) = {(folder / name).read_bytes() for name in ("one", "two")}
    return one


def dies(at: int, do: Callable[[], Any]) -> bool:
    """Whether a process that does something was killed just before its Nth call to the file system."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads; the child only deals with files
        child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, KILLED)
        return code == KILLED
    left = at

    def count() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os._exit(KILLED)

    fsync = os.fsync

    def counted(descriptor: int) -> None:
        count()
        fsync(descriptor)

    os.fsync = counted
    sys.addaudithook(lambda event, _: count() if event in EVENTS else None)
    try:
        do()
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("step", "kept"), [(40, 30), (30, 20), (20, 30)], ids=["another step", "the same step", "after going back"]
)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(step: int, kept: int, tmp_path: Path) -> None:
    template = former(tmp_path / "former")
    seen = set()
    for at in range(500):
        root = Path(shutil.copytree(template, tmp_path / str(at)))
        if not dies(at, lambda root=root: save(root, step, b"new", keep_last=2, written=stamp(45))):
            break
        found = finding.latest(root)
        assert found is not None
        seen.add((manifest.read(found).step, content(found)))
        for each in finding.checkpoints(root):
            assert content(each.path) == b"old" or each.step == step
        assert {kept, step} & set(FORMER) <= set(steps(root)), "only what retention does not want has gone"
        save(root, 50, b"next", keep_last=2)
        assert finding.incomplete(root) == []
        assert sorted(path.name for path in root.iterdir()) == [
            "latest",
            *(finding.name_of(each) for each in steps(root)),
        ]
        assert content(finding.latest(root)) == b"next"
    assert at >= 40, "so many moments to be killed at"
    assert seen == {(30, b"old"), (step, b"new")}


@pytest.mark.usefixtures("quick")
def test_a_kill_while_cleaning_up_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    template = former(tmp_path / "former")
    for at in range(500):
        root = Path(shutil.copytree(template, tmp_path / str(at)))
        (root / "step-00000030").rename(root / f".old-step-00000030-{'0' * 32}")
        (root / f".tmp-step-00000030-{'1' * 32}").mkdir()
        assert steps(root) == [10, 20, 30]
        survived = not dies(at, lambda root=root: directory.clean(root))
        assert steps(root) == [10, 20, 30]
        assert content(finding.latest(root)) == b"old"
        if survived:
            assert finding.latest(root) == root / "step-00000030"
            assert finding.incomplete(root) == []
            return
    raise AssertionError("it never ended")


def test_nothing_is_named_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine that loses its power may find: no name before what it names."""
    synced: set[int] = set()
    renamed: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def noted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(source: Any, target: Any, do: Callable[..., None]) -> None:
        kind = Path(target).name[:5]
        if kind not in (".old-", ".tras"):
            assert os.stat(source).st_ino in synced, f"{target} is named before {source} is on the disk"
            synced.discard(os.stat(Path(target).parent).st_ino)
        renamed.append(kind)
        do(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", lambda source, target: checked(source, target, rename))
    monkeypatch.setattr(os, "replace", lambda source, target: checked(source, target, replace))
    save(tmp_path, 10)
    assert renamed == ["manif", "step-", "lates"]
    assert os.stat(tmp_path).st_ino in synced, "the last name is on the disk too"


def test_latest_is_what_was_committed_last(tmp_path: Path) -> None:
    assert finding.latest(tmp_path / "nowhere") is None
    former(tmp_path)
    assert (tmp_path / "latest").read_text() == "step-00000030\n"
    save(tmp_path, 15, written=stamp(50))
    assert finding.latest(tmp_path) == tmp_path / "step-00000015", (
        "the run went back to step 10, and goes on from there"
    )


@pytest.mark.parametrize("said", [None, "step-00000020\n", "step-00000077\n", "../step-00000010", "", "\0\udcff"])
def test_a_file_latest_that_is_not_so_misleads_nobody(said: str | None, tmp_path: Path) -> None:
    former(tmp_path)
    (tmp_path / "latest").unlink()
    if said is not None:
        (tmp_path / "latest").write_bytes(said.encode(errors="surrogateescape"))
    assert finding.latest(tmp_path) == tmp_path / "step-00000030"


def test_a_later_checkpoint_that_was_deleted_or_renamed_is_told(tmp_path: Path) -> None:
    assert finding.newer_than_latest(tmp_path / "nowhere") is None
    former(tmp_path)
    save(tmp_path, 40)
    shutil.copytree(tmp_path / "step-00000030", tmp_path / "best")
    assert finding.newer_than_latest(tmp_path) is None
    (tmp_path / "step-00000040").rename(tmp_path / "good")
    assert finding.newer_than_latest(tmp_path) == (
        f"{tmp_path}/good is a checkpoint under another name than step-00000040, which is not found; rename it"
    )
    shutil.rmtree(tmp_path / "good")
    told = f"{tmp_path}/latest names step-00000040, which is not there; "
    assert finding.newer_than_latest(tmp_path) == f"{told}put it back, or remove that file to go on without it"
    (tmp_path / "latest").unlink()
    assert finding.newer_than_latest(tmp_path) is None


def test_an_older_checkpoint_that_latest_was_set_to_is_told(tmp_path: Path) -> None:
    former(tmp_path)
    (tmp_path / "latest").write_text("step-00000010\n")
    assert finding.newer_than_latest(tmp_path) == (
        f"{tmp_path}/latest names step-00000010, and step-00000030 was saved after it; to go back, load "
        f"{tmp_path}/step-00000010 by its path, or delete the later ones"
    )


def test_a_clock_that_went_back_does_not_hide_a_checkpoint(tmp_path: Path) -> None:
    former(tmp_path)
    save(tmp_path, 40, written=stamp(5))
    assert finding.latest(tmp_path) == tmp_path / "step-00000040"


def test_latest_is_the_last_commit_whatever_the_clock_and_the_pointer_say(tmp_path: Path) -> None:
    """A run that went back from step 30 to step 10; the clocks of both machines differ, and it was killed before it
    could point."""
    for step in FORMER:
        save(tmp_path, step, written=stamp(step + 100), run="a" * 8)
    shutil.rmtree(tmp_path / "step-00000020")
    pointer = (tmp_path / "latest").read_text()
    newest = save(tmp_path, 20, run="a" * 8)
    assert finding.latest(tmp_path) == newest
    (tmp_path / "latest").write_text(pointer)
    assert finding.latest(tmp_path) == newest
    assert save(tmp_path, 21, keep_last=2, run="a" * 8) == finding.latest(tmp_path)
    assert steps(tmp_path) == [20, 21], "the branch that was abandoned is older"


def test_what_earlier_versions_saved_is_older_than_any_commit_with_a_number(tmp_path: Path) -> None:
    former(tmp_path)
    save(tmp_path, 20, run="0" * 8)
    (tmp_path / "latest").write_text("step-00000030\n")
    newest = save(tmp_path, 25, run="0" * 8, written=stamp(1))
    for pointer in ("step-00000030\n", "step-00000010\n", "step-00000025\n"):
        (tmp_path / "latest").write_text(pointer)
        assert finding.latest(tmp_path) == newest


def test_runs_with_the_same_steps_stand_beside_each_other(tmp_path: Path) -> None:
    """Whichever saves, retention leaves the other one alone; a step is that of the newest run."""
    one, other = "a" * 8, "b" * 8
    for step in (10, 20):
        save(tmp_path, step, b"one", run=one)
    for step in FORMER:
        newest = save(tmp_path, step, b"other", keep_last=1, run=other)
    assert [found.name for found in finding.checkpoints(tmp_path)] == [
        "step-00000010",
        "step-00000020",
        "step-00000030",
    ]
    assert finding.latest(tmp_path) == newest
    save(tmp_path, 20, b"again", run=other)
    assert content(tmp_path / "step-00000020") == b"one"
    assert content(finding.locate(tmp_path, 20)) == b"again"
    assert finding.locate(tmp_path, "step-00000020-bbbbbbbb").name == "step-00000020-bbbbbbbb"
    last = save(tmp_path, 40, keep_last=1, run=one)
    assert [found.name for found in finding.checkpoints(tmp_path)] == [
        "step-00000020-bbbbbbbb",
        "step-00000030",
        "step-00000040",
    ]
    assert finding.latest(tmp_path) == last


def test_a_kill_while_a_step_beside_another_run_is_replaced_leaves_both(tmp_path: Path) -> None:
    save(tmp_path, 10, b"one", run="a" * 8)
    beside = save(tmp_path, 10, b"other", run="b" * 8)
    beside.rename(tmp_path / f".old-{beside.name}-{'0' * 32}")
    assert [(found.step, content(found.path)) for found in finding.checkpoints(tmp_path)] == [
        (10, b"one"),
        (10, b"other"),
    ]
    directory.clean(tmp_path)
    assert content(beside) == b"other"
    assert finding.incomplete(tmp_path) == []


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [
        (None, 20, [10, 20, 30, 40, 50]),
        (2, None, [40, 50]),
        (1, 20, [20, 40, 50]),
        (9, None, [10, 20, 30, 40, 50]),
        (0, None, [50]),
    ],
)
def test_retention(last: int | None, every: int | None, kept: list[int], tmp_path: Path) -> None:
    former(tmp_path)
    save(tmp_path, 40)
    newest = save(tmp_path, 50)
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "notes").mkdir()
    deleted = directory.prune(tmp_path, last, every, newest)
    assert steps(tmp_path) == kept
    assert {int(path.name[5:]) for path in deleted} == {10, 20, 30, 40, 50} - set(kept)
    assert (tmp_path / "step-00000005").is_dir()
    assert (tmp_path / "notes").is_dir()


@pytest.mark.parametrize(("best", "kept", "first"), [("min", [20, 30, 60, 70], 30), ("max", [10, 40, 60, 70], 40)])
def test_retention_keeps_the_best_of_the_run(best: str, kept: list[int], first: int, tmp_path: Path) -> None:
    """Of equal metrics the newest; what is not a number is never the best, and neither is another run's."""
    save(tmp_path, 5, metric=-9.0, run="a" * 8)
    metrics = {10: 0.5, 20: 0.2, 30: 0.2, 40: 0.7, 50: float("nan"), 60: None, 70: 0.3}
    for step, metric in metrics.items():
        newest = save(tmp_path, step, run="b" * 8, metric=metric)
    assert directory.prune(tmp_path, 2, None, newest, keep_best=2, best=best)
    assert steps(tmp_path) == [5, *kept]
    found = finding.best(tmp_path, best)
    assert found is not None
    assert found.name == finding.name_of(first)
    assert finding.best(tmp_path / "nowhere", best) is None


def test_retention_after_going_back_keeps_the_branch_that_runs(tmp_path: Path) -> None:
    former(tmp_path)
    save(tmp_path, 12, keep_last=2, written=stamp(40))
    save(tmp_path, 14, keep_last=2, written=stamp(41))
    assert steps(tmp_path) == [12, 14]


def test_retention_deletes_nothing_that_it_cannot_read(tmp_path: Path) -> None:
    former(tmp_path)
    (tmp_path / "step-00000010" / "manifest.json").write_text('{"format": "unishard", "version": 2}')
    directory.prune(tmp_path, 1, None, tmp_path / "step-00000030")
    assert steps(tmp_path) == [10, 30]


def test_a_run_that_does_not_own_a_directory_deletes_only_what_it_has_begun(tmp_path: Path) -> None:
    mine = directory.begin(tmp_path, 10)
    other = tmp_path / f".tmp-step-00000010-{'0' * 32}"
    other.mkdir()
    directory.clean(tmp_path, owns=False)
    assert not mine.exists()
    assert other.is_dir()
    directory.clean(tmp_path)
    assert not other.exists()


def test_cleaning_touches_nothing_of_others(tmp_path: Path) -> None:
    names = [".tmp-data", ".trash-0", "step-1", "step-00000010", ".old-step-00000010", ".latest-mine"]
    for name in names:
        (tmp_path / name).mkdir()
    directory.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert finding.incomplete(tmp_path) == ["step-00000010"]


def test_a_folder_without_a_manifest_gives_way(tmp_path: Path) -> None:
    (tmp_path / "step-00000010").mkdir()
    (tmp_path / "step-00000010" / "one").write_text("half")
    assert content(save(tmp_path, 10, b"new")) == b"new"


def test_what_has_no_manifest_is_not_committed(tmp_path: Path) -> None:
    former(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no manifest\.json; write the manifest before"):
        directory.commit(directory.begin(tmp_path, 30), tmp_path, 30)
    assert content(tmp_path / "step-00000030") == b"old"


def test_what_is_meant_is_found(tmp_path: Path) -> None:
    former(tmp_path)
    for which, step in (("latest", 30), (20, 20), ("20", 20), ("step-00000010", 10), ("step-10", 10)):
        assert finding.locate(tmp_path, which) == tmp_path / finding.name_of(step)
    assert finding.locate(tmp_path / "step-00000010") == tmp_path / "step-00000010"


@pytest.mark.parametrize(
    ("where", "which", "message"),
    [
        (".", 25, "no complete checkpoint at step 25; available: 10, 20, 30"),
        (".", "best", "no complete checkpoint named 'best'; available: 10, 20, 30"),
        ("nowhere", "latest", "no such folder"),
        ("empty", "latest", "no complete checkpoint; give the folder"),
        ("begun", "latest", "a killed run left only incomplete files"),
        ("plain", "latest", "without a manifest; convert it with `unishard checkpoint convert`"),
        ("latest", "latest", "no such folder"),
    ],
)
def test_what_is_not_there_is_told(where: str, which: str | int, message: str, tmp_path: Path) -> None:
    former(tmp_path)
    (tmp_path / "empty").mkdir()
    directory.begin(tmp_path / "begun", 3)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / ".metadata").touch()
    with pytest.raises(CheckpointError, match=message):
        finding.locate(tmp_path / where, which)


def test_a_root_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"file: cannot create a checkpoint here \(.*\); choose a writable folder"
    ):
        directory.begin(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match=r"cannot create a checkpoint here"):
        directory.begin(tmp_path / "file" / "below", 1)
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        finding.checkpoints(tmp_path / "file")


def test_a_name_that_no_file_can_have_is_one_error() -> None:
    for given in ("a\0b", "a\ud800", "", 3):
        with pytest.raises(ContractError, match=r"save: .* is not a path; pass the path of a directory"):
            path_of(given, "save")  # type: ignore[arg-type]
    assert path_of("a\udc80", "save") == Path("a\udc80")  # a byte that is not UTF-8
