"""`checkpoint.copy_to` on a server of S3: what a run copies there, and what a later one takes from there."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from forking import in_a_fork
from harness import (
    EACH,
    OTHER,
    config,
    heard,
    in_ranks,
    my_rank,
    own_share,
    prepare,
    problems_of,
    refused,
    steps,
    train,
    until,
)
from object_store import ObjectStore, use

from unishard.checkpoint import finding
from unishard.checkpoint.remote import copying, uploads
from unishard.config.paths import url_of

pytestmark = pytest.mark.ranks
URL = "s3://bucket/run"


def served(root: str) -> ObjectStore:
    """A server in the process of rank 0, which all ranks use."""
    told = Path(root, "port")
    if my_rank() == 0:
        server = ObjectStore(Path(root, "s3"))
        told.with_name("draft").write_text(str(server.port))
        told.with_name("draft").rename(told)
    else:
        until(told.exists)
        server = None
    use(int(told.read_text()))
    return server


def copied(root: str, **checkpoint: object) -> dict[str, object]:
    return {"dir": f"{root}/run", "copy_to": URL, "on_existing": "resume", "every_steps": 1, **checkpoint}


def on_first(act, *arguments) -> None:
    if my_rank() == 0:
        act(*arguments)
    dist.barrier()


@in_ranks(cells=EACH)
def test_another_engine_on_an_empty_disk_goes_on_from_the_copies(backend, root, monkeypatch):
    """Two ranks that take themselves for two machines; then one machine without the directory."""
    server = served(root)
    with monkeypatch.context() as apart:
        apart.setattr(copying, "_POLL", 0.1)
        apart.setattr(socket, "gethostname", lambda: f"node{my_rank()}")
        with prepare(config(backend, checkpoint=copied(root, keep_last=2))) as engine:
            train(engine, own_share(3))
            engine.export(f"{root}/exported")
    left = [thread.name for thread in threading.enumerate() if "copies" in thread.name]
    place = {"dir": f"{root}/run", "on_existing": "resume"}
    with prepare(config(OTHER[backend], checkpoint=place)) as engine:
        expected = train(engine, own_share(2))
        on_first(shutil.rmtree, f"{root}/run")
    with heard() as said, prepare(config(OTHER[backend], checkpoint=copied(root, keep_last=2))) as engine:
        resumed = engine.resumed
        losses = train(engine, own_share(2))
    assert not left
    assert (resumed.step, losses) == (3, expected)
    if server is not None:
        folder = server.folder / "run"
        exported = {file.name: file.read_bytes() for file in Path(root, "exported").iterdir()}
        assert {file.name: file.read_bytes() for file in (folder / "exports/exported").iterdir()} == exported
        assert f"{URL}: fetching the latest checkpoint, {resumed.path.name}, to {root}/run" in said
        assert [problems_of(found.path) for found in finding.checkpoints(folder)] == [[], []]
        assert steps(folder) == steps(f"{root}/run") == [4, 5]


@in_ranks(cells=EACH)
def test_a_load_takes_a_url_and_each_node_fetches_it_once(backend, root, monkeypatch):
    server = served(root)
    other = config(OTHER[backend])
    with prepare(config(backend, checkpoint=copied(root))) as engine:
        train(engine, own_share(2))
    with prepare(other) as engine:
        engine.load(f"{root}/run")
        expected = train(engine, own_share(2))
    temporary = Path(root, "temporary")
    temporary.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    for hosts in ([0, 0], [0, 1]):
        monkeypatch.setattr(socket, "gethostname", lambda hosts=hosts: f"node{hosts[my_rank()]}")
        before = 0 if server is None else len(server.got)
        dist.barrier()
        with heard() as said, prepare(other) as engine:
            resumed = engine.load(URL)
            dist.barrier()
            assert not list(temporary.iterdir())
            assert train(engine, own_share(2)) == expected
        if server is not None:
            fetched = Counter(key for key in server.got[before:] if key.endswith(".distcp"))
            assert set(fetched.values()) == {len(set(hosts))}
            assert any(line.startswith(f"{url_of(resumed.path)}: fetching it to ") for line in said)
    with prepare(other) as engine:
        assert engine.load(resumed.path).step == 2
        assert "no complete checkpoint" in refused(engine.load, "s3://bucket/nothing")
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
            told = refused(engine.load, URL)
        assert f"GiB, and 0.00 GiB are free in {temporary}; set TMPDIR" in told
        dist.barrier()
        assert not list(temporary.iterdir())


@in_ranks
def test_a_moving_average_at_a_url_stays_until_it_is_asked_for(root, monkeypatch):
    served(root)
    temporary = Path(root, "temporary")
    temporary.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with prepare(config("fsdp", checkpoint=copied(root))) as engine:
        average = engine.weights.average(0.5)
        train(engine, own_share(2))
        expected = average.read("head.weight")
    with prepare(config("deepspeed")) as engine:
        engine.load(URL)
        assert list(temporary.iterdir())
        found = engine.weights.average(0.5).read("head.weight")
        train(engine, own_share(1))
        engine.save(f"{root}/elsewhere")
        assert not [each for each in temporary.iterdir() if "fetched" in each.name]
    assert found.equal(expected)


@in_ranks
def test_a_store_that_is_away_stops_no_run_and_is_not_taken_for_an_empty_one(root, monkeypatch):
    monkeypatch.setattr(uploads, "PATIENCE", 1.0)
    server = served(root)
    cfg = config("fsdp", "no_shard", checkpoint=copied(root, async_save=True))
    if server is not None:
        server.stop()
    with heard() as said, prepare(cfg.override("checkpoint.on_existing=error")) as engine:
        train(engine, own_share(2))
        engine.wait()
        saved = steps(f"{root}/run")
        on_first(lambda: server.start())
    assert saved == [1, 2]
    if server is not None:
        assert any("checkpoints are copied as soon as it answers" in line for line in said)
        assert any(line.endswith("failed") and "to copy" in line for line in said) or len(server.complete("run")) == 2
        assert steps(server.folder / "run") == [1, 2]
        server.stop()
    with heard() as said, prepare(cfg) as engine:
        assert engine.resumed.step == 2
        on_first(shutil.rmtree, f"{root}/run")
    told = refused(prepare, cfg)
    assert "it is not known whether a checkpoint is there" in told
    assert told.startswith("CheckpointError: ")


@in_ranks
def test_what_cannot_be_copied_is_refused_before_the_first_update(root):
    server = served(root)
    cfg = config("fsdp", "no_shard", checkpoint=copied(root))
    nowhere = config("fsdp", "no_shard", checkpoint=copied(root, copy_to="s3://no-such-bucket/run"))
    said = [refused(prepare, nowhere)]
    if server is not None:
        server.set(fault="denied")
    said.append(refused(prepare, cfg))
    if server is not None:
        server.set()
    with prepare(cfg) as engine:
        train(engine, own_share(3))
    other = f"{root}/other"
    with prepare(config("fsdp", "no_shard", checkpoint=copied(root, dir=other, on_existing="error"))) as engine:
        said.append(refused(train, engine, own_share(1)))
    with prepare(config("fsdp", "no_shard", checkpoint={"dir": other})) as engine:
        train(engine, own_share(1))
        engine.save()
    said.append(refused(prepare, config("fsdp", "no_shard", checkpoint=copied(root, dir=other))))
    with prepare(config("fsdp", "no_shard", checkpoint=copied(root, dir=other, on_existing="new"))) as engine:
        train(engine, own_share(1))
    on_first(lambda: None) if dist.is_initialized() else None
    wanted = [
        "s3://no-such-bucket/run/.owner: FileNotFoundError",
        f"checkpoint.copy_to: {URL}/.owner: PermissionDeniedError",
        f"{URL}: holds checkpoints of another run, the newest of step 3, and this run was not resumed from one of them",
        f"and {other} those of the run",
    ]
    assert [text.startswith("CheckpointError: ") and each in text for text, each in zip(said, wanted, strict=True)] == [
        True
    ] * 4, said
    if server is not None:
        commits = {found.step: finding.age_of(found) for found in finding.checkpoints(server.folder / "run")}
        newest = finding.latest(server.folder / "run")
        assert newest is not None
        assert newest.name.startswith("step-00000001-")
        assert len(commits) == 3


@in_ranks(world=1, cells=EACH)
def test_what_prepare_has_opened_is_closed_where_it_fails_later(backend, root, monkeypatch):
    served(root)
    handler = signal.getsignal(signal.SIGUSR1)
    asked = copied(root, on_signal=["SIGUSR1"], async_save=True)
    cfg = config(backend, checkpoint=asked, offload={"optimizer": "nvme", "nvme_path": root})
    for fails in ("unishard.engine.state.save_and_load.RunCopies", "unishard.engine.engine.Framework"):
        with monkeypatch.context() as late:
            late.setattr(fails, lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                prepare(cfg)
        assert not [thread.name for thread in threading.enumerate() if "copies" in thread.name or "nvme" in thread.name]
        assert signal.getsignal(signal.SIGUSR1) is handler
        files = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
        assert not [file for file in files if file.startswith(f"{root}/#")]
    with prepare(cfg) as engine:
        train(engine, own_share(1))


def killed(root: str) -> tuple[list[int], list[int]]:
    """A run of one rank that is killed while it copies; then another one."""
    server = ObjectStore(Path(root, "s3"))
    server.use()
    place = copied(root, every_steps=2)
    child = os.fork()
    if child == 0:
        with prepare(config("fsdp", "no_shard", checkpoint=place)) as engine:
            train(engine, own_share(4))
        os._exit(0)
    server.set(slow="step-00000004", seconds=0.5)
    until(lambda: any("step-00000004" in key for key in server.put))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    before = steps(server.folder / "run")
    server.set()
    with prepare(config("fsdp", "no_shard", checkpoint=place)) as engine:
        assert engine.resumed is not None
    return before, steps(server.folder / "run")


def test_a_run_that_is_killed_while_it_copies_is_gone_on_from_with_nothing_lost(tmp_path):
    before, after = in_a_fork(killed, str(tmp_path))
    assert before == [2]
    assert after == [2, 4]
