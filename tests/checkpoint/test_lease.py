"""Two runs in one directory of checkpoints: which one owns it, when another one may take it over, and what the loser
touches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from stored import save

from unishard.checkpoint import directory, finding, lease, ownership
from unishard.distributed.processes import is_running, machine, parent, started
from unishard.errors import CheckpointError

pytestmark = pytest.mark.skipif(not machine(), reason="needs /proc")
OTHER = "b" * 16
ELSEWHERE = "another-boot pid:[1]"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, seconds in {"BEAT": 0.05, "LIMIT": 0.4, "GRACE": 0.2, "_POLL": 0.02}.items():
        monkeypatch.setattr(lease, name, seconds)
    yield
    ownership._release_all()
    ownership._owned.clear()


@pytest.fixture
def living() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


class Engine:
    """What owns directories."""


def owned_by(root: Path, **said: Any) -> Path:
    """A lease of another process."""
    root.mkdir(exist_ok=True)
    file = root / lease.FILE
    file.touch()
    facts = {
        "owner": OTHER,
        "run": "1f3a9c2e",
        "host": "node7",
        "machine": machine(),
        "pid": 1,
        "started": "1",
        "since": "noon",
    }
    facts |= {"file": file.stat().st_ino} | said
    file.write_text(json.dumps(facts) + f"\n{0:020}\n")
    return file


def own(root: Path, engine: object, **named: Any) -> None:
    ownership.own(root, engine, lambda: "2b2b2b2b", None, **named)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, without a process group."""
    monkeypatch.setattr(ownership, "on_first", lambda group, act: act())


def taken(root: Path) -> bool:
    there = lease.read(root)
    return there is not None and there.owner == lease.token()


def test_the_first_run_owns_a_directory_until_it_closes(tmp_path: Path) -> None:
    engine, root = Engine(), tmp_path / "new"
    own(root, engine)
    there = lease.read(root)
    assert there is not None
    assert (there.owner, there.run, there.pid, there.is_living) == (lease.token(), "2b2b2b2b", os.getpid(), True)
    ownership.release(engine)
    there = lease.read(root)
    assert there is not None
    assert there.is_gone
    assert [thread.name for thread in threading.enumerate() if thread.name == "unishard-owner"] == []
    assert sorted(os.listdir(root)) == [lease.FILE]


def test_a_living_run_is_named(tmp_path: Path, living: int) -> None:
    owned_by(tmp_path, pid=living, started=started(living))
    before = (tmp_path / lease.FILE).read_bytes()
    with pytest.raises(CheckpointError) as error:
        own(tmp_path, Engine())
    assert f"run 1f3a9c2e (process {living} on node7, since noon) saves here and is still alive" in str(error.value)
    assert "set another checkpoint.dir, or end that run first" in str(error.value)
    assert (tmp_path / lease.FILE).read_bytes() == before


def beating(file: Path, until: threading.Event) -> None:
    number = 0
    while not until.wait(0.05):
        number += 1
        with file.open("r+b") as there:
            os.pwrite(there.fileno(), f"{number:020}\n".encode(), len(there.readline()))


def test_a_run_on_another_machine_lives_while_its_number_grows(tmp_path: Path) -> None:
    file, until = owned_by(tmp_path, machine=ELSEWHERE), threading.Event()
    thread = threading.Thread(target=beating, args=(file, until))
    thread.start()
    try:
        with pytest.raises(CheckpointError, match=r"node7.* is still alive"):
            own(tmp_path, Engine())
    finally:
        until.set()
        thread.join()
    own(tmp_path, Engine())
    assert taken(tmp_path)


STALE: dict[str, Callable[[Path], object]] = {
    "its process is gone": lambda root: owned_by(root, pid=2**22 + 1),
    "its number was given to another process": lambda root: owned_by(root, pid=os.getpid(), started="1"),
    "another machine, no beat": lambda root: owned_by(root, machine=ELSEWHERE),
    "the same host before it was started anew": lambda root: owned_by(
        root, machine="former-boot pid:[4026531836]", host="vm"
    ),
    "no machine known": lambda root: owned_by(root, machine=""),
    "a copy of the directory of a living run": lambda root: owned_by(
        root, pid=os.getppid(), started=started(os.getppid()), file=1
    ),
    "half written": lambda root: (root / lease.FILE).write_text('{"owner": "bb'),
    "empty": lambda root: (root / lease.FILE).touch(),
    "something else": lambda root: (root / lease.FILE).write_text("[1, 2]\n\n"),
    "other types": lambda root: owned_by(root, pid="1", machine=None),
    "released": lambda root: owned_by(root).write_text(
        (root / lease.FILE).read_text().replace("0" * 20, "released".ljust(20))
    ),
}


@pytest.mark.parametrize("why", STALE)
def test_a_stale_lease_is_taken_over(why: str, tmp_path: Path) -> None:
    STALE[why](tmp_path)
    begin = time.monotonic()
    own(tmp_path, Engine())
    assert taken(tmp_path)
    assert os.listdir(tmp_path) == [f"{lease.FILE}-1"]
    if why in ("its process is gone", "its number was given to another process", "released"):
        assert time.monotonic() - begin < 0.3, "at once"


def test_a_rank_on_the_machine_of_the_former_owner_knows_that_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned_by(tmp_path, machine=ELSEWHERE)
    monkeypatch.setattr(lease, "LIMIT", 60.0)
    monkeypatch.setattr(
        ownership, "ranks_of", lambda group: type("Ranks", (), {"gather": staticmethod(lambda value: [value, True])})
    )
    own(tmp_path, Engine())
    assert taken(tmp_path)


def test_a_process_that_has_ended_but_was_not_asked_about_is_gone() -> None:
    process = subprocess.Popen(["true"])
    end = time.monotonic() + 10
    while started(process.pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not started(process.pid)
    assert Path(f"/proc/{process.pid}").exists()
    process.wait()
    assert is_running(os.getpid(), started(os.getpid()))
    assert parent(os.getpid()) == os.getppid()


def test_a_run_whose_directory_was_taken_saves_no_more_and_deletes_nothing(tmp_path: Path) -> None:
    engine = Engine()
    own(tmp_path, engine)
    mine = directory.begin(tmp_path, 10)
    shutil.rmtree(tmp_path / lease.FILE, ignore_errors=True)
    (tmp_path / lease.FILE).unlink()
    owned_by(tmp_path, machine=ELSEWHERE)
    theirs = [tmp_path / f".{kind}-step-00000020-{OTHER}{'0' * 16}" for kind in ("tmp", "trash", "old")]
    for folder in theirs:
        folder.mkdir()
    (theirs[2] / "manifest.json").touch()
    with pytest.raises(
        CheckpointError,
        match=r"run 1f3a9c2e \(process 1 on node7.* has taken over this directory.*another checkpoint.dir",
    ):
        ownership.confirm(tmp_path)
    assert ownership.is_lost(tmp_path)
    directory.clean(tmp_path, owns=not ownership.is_lost(tmp_path))
    assert not mine.exists()
    assert all(folder.exists() for folder in theirs)
    (tmp_path / lease.FILE).unlink()  # the other one is over, and somebody has tidied up
    with pytest.raises(CheckpointError, match="has taken over this directory"):
        ownership.confirm(tmp_path)
    ownership.release(engine)
    assert not (tmp_path / lease.FILE).exists()


def test_a_run_that_was_stopped_sees_who_came_and_went_meanwhile(tmp_path: Path) -> None:
    own(tmp_path, Engine_held := Engine())
    (tmp_path / lease.FILE).unlink()
    owned_by(tmp_path).write_text((tmp_path / lease.FILE).read_text().replace("0" * 20, "released".ljust(20)))
    with pytest.raises(CheckpointError, match="run 1f3a9c2e"):
        ownership.confirm(tmp_path)
    del Engine_held


def test_the_beat_grows_and_is_never_written_into_the_lease_of_another_run(tmp_path: Path) -> None:
    engine = Engine()
    own(tmp_path, engine)
    begin = (tmp_path / lease.FILE).read_text()
    end = time.monotonic() + 5
    while (tmp_path / lease.FILE).read_text() == begin and time.monotonic() < end:
        time.sleep(0.02)
    assert (tmp_path / lease.FILE).read_text() != begin
    (tmp_path / lease.FILE).unlink()
    other = owned_by(tmp_path).read_bytes()
    assert not lease.beat(tmp_path, 7)
    ownership.release(engine)
    assert (tmp_path / lease.FILE).read_bytes() == other


def test_engines_of_one_process_own_a_directory_together_and_one_after_the_other(tmp_path: Path) -> None:
    first, second = Engine(), Engine()
    for engine in (first, second):
        own(tmp_path, engine)
        own(tmp_path / f"{id(engine)}", engine)
    ownership.release(first)
    assert lease.read(tmp_path).is_living  # type: ignore[union-attr]
    ownership.release(second)
    assert lease.read(tmp_path).is_gone  # type: ignore[union-attr]
    own(tmp_path, first)
    assert lease.read(tmp_path).is_living  # type: ignore[union-attr]


def test_an_engine_that_nobody_closes_gives_its_directory_back(tmp_path: Path) -> None:
    own(tmp_path, Engine())
    end = time.monotonic() + 5
    while not lease.read(tmp_path).is_gone and time.monotonic() < end:  # type: ignore[union-attr]
        time.sleep(0.02)
    assert lease.read(tmp_path).is_gone  # type: ignore[union-attr]


def test_a_directory_that_vanished_is_owned_again(tmp_path: Path) -> None:
    engine, root = Engine(), tmp_path / "gone"
    own(root, engine)
    shutil.rmtree(root)
    ownership.confirm(root)
    root.mkdir()
    ownership.confirm(root)
    assert taken(root)


def test_of_many_that_find_a_stale_lease_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads in place of processes, each with a token of its own."""
    own_token = threading.local()
    monkeypatch.setattr(lease, "token", lambda: own_token.value)
    for turn in range(10):
        root = tmp_path / str(turn)
        owned_by(root, pid=2**22 + 1)

        def take(number: int, root: Path = root) -> bool:
            own_token.value = f"{number:016x}"
            try:
                lease.acquire(root, "2b2b2b2b")
            except CheckpointError:
                return False
            return lease.read(root).owner == own_token.value  # type: ignore[union-attr]

        with ThreadPoolExecutor(6) as pool:
            assert sum(pool.map(take, range(1, 7))) == 1
        assert os.listdir(root) == [f"{lease.FILE}-1"]


def test_who_comes_late_takes_no_number_that_another_run_has_left_behind(tmp_path: Path, living: int) -> None:
    """It has seen a stale lease; since then one run has come and gone, and another one has come."""
    owned_by(tmp_path, pid=living, started=started(living)).rename(tmp_path / f"{lease.FILE}-2")
    lease._create(tmp_path, "2b2b2b2b", 1)
    assert os.listdir(tmp_path) == [f"{lease.FILE}-2"]
    with pytest.raises(CheckpointError, match="run 1f3a9c2e"):
        lease.acquire(tmp_path, "2b2b2b2b")


def test_a_folder_that_cannot_be_written_is_read_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    own(file, Engine(), writes=False)
    with pytest.raises(CheckpointError, match=r"cannot create a checkpoint here \(.*\); choose a writable folder"):
        own(file, Engine())


def test_the_file_of_an_owner_is_no_checkpoint_and_its_text_is_safe_to_show(tmp_path: Path, living: int) -> None:
    owned_by(tmp_path, pid=living, started=started(living), host="a\x1b[31m\x07b")
    save(tmp_path, 10)
    assert finding.incomplete(tmp_path) == []
    assert str(lease.read(tmp_path)) == f"run 1f3a9c2e (process {living} on a?[31m?b, since noon)"
    assert (tmp_path / lease.FILE).exists()


def test_a_forked_process_is_another_one(tmp_path: Path) -> None:
    mine = lease.token()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, lease.token().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 99).decode() != mine
