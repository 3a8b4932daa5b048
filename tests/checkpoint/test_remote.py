"""Copies of checkpoints on a server of S3: what is complete there at any time, and what users are told."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store import ObjectStore
from stored import save, store
from typer.testing import CliRunner

import unishard
from dev.ranks.judging import caught, heard, until
from unishard.checkpoint import lease, manifest
from unishard.checkpoint.remote import uploads
from unishard.checkpoint.remote.cleaning import clean
from unishard.checkpoint.remote.copies import Copies, name_of
from unishard.checkpoint.remote.copying import Node, copy_checkpoint
from unishard.checkpoint.remote.owner import StoreOwner
from unishard.checkpoint.remote.store import Store, StoreError, require_installed
from unishard.checkpoint.remote.uploads import Upload, Uploads
from unishard.checkpoint.saving import Retention
from unishard.cli.checkpoint import app
from unishard.errors import CheckpointError
from unishard.integrations.accelerate.configuring import agreed

ALONE, GO = Node([0], 1), threading.Event()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    server = ObjectStore(tmp_path_factory.mktemp("s3"))
    server.use()
    yield server
    server.stop()


@pytest.fixture
def there(server: ObjectStore, tmp_path: Path) -> Store:
    server.set()
    return Store(f"s3://bucket/{tmp_path.name}")


@pytest.fixture
def copies(there: Store) -> Iterator[Copies]:
    copies = Copies(there)
    yield copies
    copies.close()


def copy(there: Store, folder: Path, node: Node = ALONE) -> str | None:
    return copy_checkpoint(there, folder, node, lambda: None, GO)


def test_a_copy_is_complete_with_its_manifest_and_a_killed_one_is_continued(
    server: ObjectStore, there: Store, copies: Copies, tmp_path: Path
) -> None:
    folder = save(tmp_path, 10, b"content", run="1a1a1a1a")
    name = name_of(10, (folder / manifest.FILE).read_bytes())
    there.put(folder / "one", f"{name}/one")  # of a run that was killed
    there.write(f"{name}/two", b"con")
    before = len(server.put)
    copies.refresh()
    assert (copies.incomplete, list(copies.manifests.iterdir())) == ([name], [])
    assert copy(there, folder) == name
    assert [key.rpartition("/")[2] for key in server.put[before:]] == ["two", manifest.FILE]
    assert copy(there, folder) is None  # it is there
    assert {file.name: file.read_bytes() for file in (server.folder / tmp_path.name / name).iterdir()} == {
        file.name: file.read_bytes() for file in folder.iterdir()
    }
    copies.refresh()
    assert (copies.incomplete, manifest.read(copies.manifests / name).step) == ([], 10)


def test_what_is_deleted_or_replaced_while_it_is_copied_gets_no_manifest(
    there: Store, copies: Copies, tmp_path: Path
) -> None:
    def put(path: Path, name: str, tell: object) -> None:
        original(path, name)
        act()

    original, there.put = there.put, put  # type: ignore[method-assign]
    folder = save(tmp_path, 10, b"before", run="1a1a1a1a")
    act = lambda: shutil.rmtree(folder, ignore_errors=True)  # noqa: E731
    assert copy(there, folder) is None
    folder = save(tmp_path, 20, b"before", run="1a1a1a1a")
    act = lambda: [shutil.rmtree(folder), save(tmp_path, 20, b"behind", run="1a1a1a1a")]  # noqa: E731
    assert copy(there, folder) is None
    act = lambda: None  # noqa: E731
    name = copy(there, folder)
    assert name
    assert there.read(f"{name}/one") == b"behind"
    copies.refresh()
    assert [path.name for path in copies.manifests.iterdir()] == [name]


def test_the_node_of_rank_0_waits_for_the_others_and_does_what_a_gone_one_has_left(
    there: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unishard.checkpoint.remote.copying._POLL", 0.05)
    first, second = Node([0, 1], 4), Node([2, 3], 4)
    folder = save(tmp_path, 10, b"x", run="1a1a1a1a", names=[f"__{rank}_0.distcp" for rank in range(4)])
    assert [second.copies(f"__{rank}_0.distcp") for rank in range(5)] == [False, False, True, True, False]
    assert copy(there, folder, second) is None
    name = name_of(10, (folder / manifest.FILE).read_bytes())
    assert there.sizes(name) == {"__2_0.distcp": 1, "__3_0.distcp": 1}
    there.delete(f"{name}/__3_0.distcp")
    done: list[str | None] = []
    thread = threading.Thread(target=lambda: done.append(copy(there, folder, first)))
    thread.start()
    assert until(lambda: "__1_0.distcp" in there.sizes(name))
    time.sleep(0.2)
    assert not done
    there.put(folder / "__3_0.distcp", f"{name}/__3_0.distcp")
    thread.join(10)
    assert done == [name]
    monkeypatch.setattr("unishard.checkpoint.remote.copying._MINUTE", 0.1)
    there.delete(f"{name}/{manifest.FILE}")
    there.delete(f"{name}/__3_0.distcp")
    assert copy(there, folder, first) == name


def test_kept_are_the_same_as_in_the_directory(there: Store, copies: Copies, tmp_path: Path) -> None:
    theirs = copy(there, save(tmp_path / "theirs", 5, run="2b2b2b2b"))
    there.write("step-00000007-00000000/one", b"")  # left by a killed run
    coming = save(tmp_path / "own", 50, run="1a1a1a1a")
    there.write(f"{name_of(50, (coming / manifest.FILE).read_bytes())}/one", b"")
    for step in (10, 20, 30, 30):
        name = copy(there, save(tmp_path / "own", step, run="1a1a1a1a"))
        assert name
        clean(copies, name, Retention(keep_last=2, keep_every=10**6), tmp_path / "own")
    copies.refresh()
    assert [path.name[:13] for path in sorted(copies.manifests.iterdir())] == [
        str(theirs)[:13], "step-00000020", "step-00000030",
    ]  # fmt: skip
    assert [name[:13] for name in copies.incomplete] == ["step-00000050"]


def test_two_runs_do_not_copy_to_one_place(there: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LIMIT", 1.5)
    mine = StoreOwner(there, lambda: "1a1a1a1a")
    mine.claim()
    mine.claim()
    text = there.read(lease.FILE)
    assert text is not None
    line, _, beats = text.partition(b"\n")
    other = json.dumps(json.loads(line) | {"owner": "b" * 16, "host": "node7", "machine": "", "run": "2b2b2b2b"})
    there.write(lease.FILE, other.encode() + b"\n" + beats)
    lost = "copies its checkpoints here now; this run copies nothing more"
    assert lost in caught(CheckpointError, mine.claim)
    mine.release()
    assert there.read(lease.FILE) == other.encode() + b"\n" + beats

    living = threading.Event()

    def beat() -> None:
        while not living.wait(0.2):
            there.write(lease.FILE, f"{other}\n{time.monotonic_ns()}\n".encode())

    thread = threading.Thread(target=beat)
    thread.start()
    said = caught(CheckpointError, StoreOwner(there, lambda: "3c3c3c3c").claim)
    assert "run 2b2b2b2b (process" in said
    assert "copies its checkpoints here and is still alive; set another checkpoint.copy_to" in said
    living.set()
    thread.join()
    later = StoreOwner(there, lambda: "3c3c3c3c")
    later.claim()  # it has shown no sign of life
    later.release()
    assert threading.active_count() == len([t for t in threading.enumerate() if "copies" not in t.name])


def test_a_failing_store_is_asked_again_and_given_up_only_at_the_end(
    server: ObjectStore, there: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PATIENCE", 0.2)
    folder = save(tmp_path, 10, b"content", run="1a1a1a1a")
    job = Upload("step 10", lambda stopped, tell: copy(there, folder) and None)
    server.set(fault="full")
    with heard(level=logging.WARNING) as said:
        begun = time.monotonic()
        queue = Uploads(there.url)
        queue.add(job)
        assert time.monotonic() - begun < 0.1
        assert until(lambda: queue.failed)
        server.set()
        queue.close()
    assert server.complete(tmp_path.name)
    assert "step 10: attempt 1 failed: s3://bucket/" in said[0]
    assert said[-1] == f"{there.url}: {queue.failed} attempt{'s' * (queue.failed > 1)} to copy failed"
    server.set(fault="denied")
    folder = save(tmp_path, 20, b"content", run="1a1a1a1a")
    with heard(level=logging.WARNING) as said:
        queue = Uploads(there.url)
        queue.add(job)
        queue.close()
    assert any(
        f"{there.url}: not copied: step 10, which the next run with this checkpoint.dir" in line for line in said
    )
    assert not [thread for thread in threading.enumerate() if thread.name == "unishard-copies"]


def test_while_it_waits_it_says_what_is_sent(
    server: ObjectStore, there: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_SAID_EVERY", 0.1)
    folder = save(tmp_path, 10, b"x" * 1_500_000, run="1a1a1a1a", names=["one", "two"])
    server.set(slow="two", seconds=0.5)
    with heard(level=logging.WARNING) as said:
        queue = Uploads(there.url)
        queue.add(Upload("step 10", lambda stopped, tell: copy_checkpoint(
            there, folder, ALONE, lambda: None, stopped, tell) and None))  # fmt: skip
        queue.close()
    assert f"{there.url}: still copying step 10; sent 1.5 of 3.0 MB of the first, the last 0 s ago" in said
    assert server.complete(tmp_path.name)


def test_what_is_proof_and_what_may_pass(server: ObjectStore, there: Store) -> None:
    def of(act, *arguments: object) -> bool:
        with pytest.raises(StoreError) as raised:
            act(*arguments)
        return raised.value.is_proof

    assert of(Store("s3://no-such-bucket/run").write, "a", b"")
    server.set(fault="denied")
    assert of(there.write, "a", b"")
    server.set(fault="full")
    assert not of(there.write, "a", b"")
    server.stop()
    assert not of(there.write, "a", b"")
    assert not of(there.names)
    server.start()
    assert there.names() == {}


def test_commands_take_a_url(server: ObjectStore, there: Store, tmp_path: Path) -> None:
    """As of a directory with the same."""
    for step in (10, 20):
        folder = tmp_path / "run" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        store(folder, step=step, run="1a1a1a1a", commit=step)
        copy(there, folder)
    there.write("step-00000030-00000000/one", b"12345")

    def printed(*words: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == code, (words, result.output, result.exception)
        return result.output

    listed, local = (json.loads(printed("list", "--json", place)) for place in (there.url, tmp_path / "run"))
    assert [entry["bytes"] for entry in listed[:2]] == [entry["bytes"] for entry in local]
    assert [(entry["step"], entry["state"]) for entry in listed] == [
        (10, "complete"), (20, "complete"), (30, "incomplete"),
    ]  # fmt: skip
    inspected, locally = (json.loads(printed("inspect", "--json", place)) for place in (there.url, tmp_path / "run"))
    assert inspected.pop("path") == f"{there.url}/{listed[1]['name']}"
    locally.pop("path")
    assert inspected == locally
    assert f"{there.url}/{listed[0]['name']}: ok" in printed("verify", "--bits", f"{there.url}/{listed[0]['name']}")
    printed("export", there.url, tmp_path / "exported")
    printed("export", tmp_path / "run", tmp_path / "local")
    exported = {file.name: file.read_bytes() for file in (tmp_path / "exported").iterdir()}
    assert exported == {file.name: file.read_bytes() for file in (tmp_path / "local").iterdir()}
    printed("convert", there.url, tmp_path / "converted", "--to", "dcp")
    assert "equal: " in printed("diff", there.url, tmp_path / "run")
    damaged = next((server.folder / tmp_path.name / listed[1]["name"]).glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert f"{there.url}/{listed[1]['name']}/{damaged.name}: has" in printed("verify", there.url, code=1)


def test_a_missing_package_and_a_framework_that_saves_elsewhere_are_errors_of_the_config() -> None:
    def asked(url: str) -> unishard.Config:
        return unishard.Config.model_validate({"checkpoint": {"dir": "runs", "copy_to": url}})

    for url, said in (
        ("gs://bucket/run", "install it with `pip install gcsfs`"),
        ("no-such-scheme://bucket/run", "write a URL with a scheme of fsspec"),
    ):
        text = caught(unishard.ConfigError, require_installed, asked(url).checkpoint)
        assert text.startswith("ConfigError: checkpoint.copy_to: ")
        assert said in text
    assert "checkpoint.copy_to: copies what engine.save writes in checkpoint.dir, and the framework" in caught(
        unishard.ConfigError, agreed, asked("file:///copies"), {}
    )
    for url, said in (
        ("runs/a", "is no URL; write one with a scheme of fsspec"),
        ("sftp://me:secret@host/run", "contains a password, which would be written into checkpoints"),
        ("s3://bucket/$USER", "contains $USER"),
    ):
        assert f"checkpoint.copy_to: {said}" in caught(unishard.ConfigError, asked, url)
