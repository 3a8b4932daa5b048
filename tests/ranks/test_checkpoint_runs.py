"""Runs that share a directory of checkpoints: which one is resumed, what a new one does to an older one, what retention
leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from harness import EACH, OTHER, config, heard, in_ranks, my_rank, own_share, prepare, refused, train

from unishard.checkpoint import finding, manifest


def names(root):
    return [found.name for found in finding.checkpoints(Path(root))]


def runs(root):
    return {found.name: manifest.read(found.path).run for found in finding.checkpoints(Path(root))}


@in_ranks(cells=EACH, in_turn=True)
def test_the_config_alone_resumes_the_newest_checkpoint_and_its_run(backend, root):
    """The same program three times, without a call that loads; the second time on the other engine, the third with a
    job killed at once."""
    checkpoint = {"dir": root, "every_steps": 2, "keep_last": 2, "on_existing": "resume"}
    for kind, begins in ((backend, 0), (OTHER[backend], 4), (backend, 8)):
        with prepare(config(kind, "no_shard", checkpoint=checkpoint)) as engine:
            engine.framework.on_save(lambda: {"by": "the run"})
            resumed = engine.resumed and (engine.resumed.step, engine.resumed.state)
            assert resumed == ((begins, {"by": "the run"}) if begins else None)
            if begins < 8:
                train(engine, own_share(5))
    (one,) = {*runs(root).values()}
    assert len(one) == 8
    assert names(root) == ["step-00000006", "step-00000008"]


@in_ranks(cells=EACH, in_turn=True)
def test_a_run_whose_last_checkpoint_is_gone_does_not_begin_again_in_silence(backend, root):
    """The last of two is deleted, then the other one renamed."""
    cfg = config(backend, "no_shard", checkpoint={"dir": root, "every_steps": 1, "on_existing": "resume"})
    with prepare(cfg) as engine:
        train(engine, own_share(2))
    dist.barrier()
    if my_rank() == 0:
        shutil.rmtree(f"{root}/step-00000002")
    dist.barrier()
    with heard() as lines, prepare(cfg) as engine:
        assert engine.resumed.step == 1
    told = f"{root}/latest names step-00000002, which is not there; "
    assert my_rank() or any(line.startswith(told) for line in lines)
    dist.barrier()
    if my_rank() == 0:
        Path(root, "step-00000001").rename(f"{root}/good")
    dist.barrier()
    assert refused(prepare, cfg) == (
        f"CheckpointError: {root}/good is a checkpoint under another name than step-00000001, which is not found; "
        "rename it; a new run does not begin in its place"
    )


@in_ranks(cells=EACH, in_turn=True)
def test_a_new_run_beside_an_older_one_replaces_and_deletes_nothing_of_it(backend, root):
    """A new run beside an older one, with the same steps; then the older one is continued, and the newer one."""
    cfg = config(backend, "no_shard", checkpoint={"dir": root, "every_steps": 1, "keep_last": 2, "on_existing": "new"})
    with prepare(cfg) as engine:
        train(engine, own_share(3))
    with prepare(cfg) as engine:
        train(engine, own_share(3))
        assert engine.resumed is None
    newest, both = finding.latest(Path(root)), runs(root)
    first, second = both["step-00000002"], both[newest.name]
    assert first != second
    mine = {f"step-0000000{step}-{second}": second for step in (2, 3)}
    assert both == {"step-00000002": first, "step-00000003": first} | mine
    assert newest.name == f"step-00000003-{second}"
    with prepare(cfg) as engine:
        engine.load(f"{root}/step-00000003")
        train(engine, own_share(1))
        assert finding.latest(Path(root)).name == "step-00000004"
        assert runs(root) == {"step-00000003": first, "step-00000004": first} | mine
    with prepare(cfg) as engine:
        assert engine.load(newest).path == engine.resumed.path
        train(engine, own_share(1))
    latest = f"step-00000004-{second}"
    assert finding.latest(Path(root)).name == latest
    assert names(root) == ["step-00000003", newest.name, "step-00000004", latest]


@in_ranks(cells=EACH, in_turn=True)
def test_loading_from_another_directory_is_a_new_run(backend, root):
    """For which the directory must be empty, or `on_existing: new`."""
    base, folder = f"{root}/base", f"{root}/branches"
    with prepare(config(backend, "no_shard")) as engine:
        train(engine, own_share(1))
        engine.save(base)
    for kind in ("error", "resume", "new", "error, before a save"):
        cfg = config(backend, "no_shard", checkpoint={"dir": folder, "on_existing": kind.partition(",")[0]})
        with prepare(cfg) as engine:
            assert engine.load(base).step == 1
            told = refused(train, engine, own_share(1))
            assert refused(engine.save) == told
            if kind in ("error", "new"):
                assert told == "nothing"
            else:
                assert "branches: holds checkpoints of another run, the newest of step " in told
                assert f"was loaded from {base}/step-00000001; set checkpoint.on_existing to `new`" in told
            if kind == "error":
                engine.load(base)
                assert refused(train, engine, own_share(1)) == "nothing", "it has saved there itself"
            if kind == "resume":
                engine.load("latest")
                assert refused(train, engine, own_share(1)) == "nothing"
        dist.barrier()
    first, _ = names(folder)
    assert first == "step-00000002"


@in_ranks(cells=EACH, in_turn=True)
def test_a_save_into_the_directory_of_another_run_replaces_nothing(backend, root):
    """That the config does not name: what was trained is not lost, and neither is what was there."""
    saved = []
    for _ in range(2):
        with prepare(config(backend, "no_shard")) as engine:
            train(engine, own_share(1))
            saved += [engine.save(root).name, engine.save(root).name]
    with prepare(config(backend, "no_shard")) as engine:
        newest = engine.load(root).path.name
    assert saved == ["step-00000001", "step-00000001", newest, newest]
    assert newest.startswith("step-00000001-")
    assert names(root) == ["step-00000001", newest]


@in_ranks(cells=EACH, in_turn=True)
def test_a_run_of_an_earlier_version_is_resumed_as_one_run(backend, root):
    """Whose manifests name no run and no number."""
    cfg = config(backend, "no_shard", checkpoint={"dir": root, "every_steps": 1, "keep_last": 2})
    with prepare(cfg) as engine:
        train(engine, own_share(3))
    for found in finding.checkpoints(Path(root)) if my_rank() == 0 else ():
        facts = json.loads((found.path / manifest.FILE).read_text())
        for key in ("run", "commit", "crc32"):
            del facts[key]
        (found.path / manifest.FILE).write_text(json.dumps(facts))
    dist.barrier()
    with prepare(cfg) as engine:
        told = refused(train, engine, own_share(1))
        assert "holds checkpoints of another run, the newest of step 3" in told
        assert engine.load().step == 3
        train(engine, own_share(1))
    assert names(root) == ["step-00000003", "step-00000004"]


@in_ranks(cells=EACH, in_turn=True)
def test_the_best_checkpoint_is_kept_and_loaded(backend, root):
    """Saves with a metric after each update, which is best in the middle; a tensor on the device, and a run without
    one."""
    checkpoint = {"dir": root, "keep_last": 1, "keep_best": 2}
    with prepare(config(backend, "no_shard", checkpoint=checkpoint)) as engine:
        told = refused(engine.load, "best")
        assert "no checkpoint of the newest run has a metric; pass one, as in engine.save(metric=0.31)" in told
        for metric in (0.5, torch.tensor(0.25, device=engine.device), 1, None):
            train(engine, own_share(1))
            engine.save(metric=metric)
        told = refused(engine.save, metric="0.5")
        assert told == "ContractError: save: metric must be a number, got '0.5'; pass one such as engine.mean(loss)"
        assert refused(engine.save, metric=0.5 + my_rank()).startswith(
            "RankMismatchError: save: the ranks pass different metrics: rank 0 has 0.5, rank 1 has 1.5; pass"
        )
        assert "rank 0 has 0.5, rank 1 has None" in refused(engine.save, metric=None if my_rank() else 0.5)
        left = {found.step: manifest.read(found.path).metric for found in finding.checkpoints(Path(root))}
        assert left == {1: 0.5, 2: 0.25, 4: None}
        assert engine.load("best").step == 2
    with prepare(config(OTHER[backend], "no_shard", checkpoint=checkpoint | {"best": "max"})) as engine:
        assert (engine.load("best").step, engine.load("latest").step) == (1, 4)


@in_ranks(cells=EACH, in_turn=True)
def test_a_directory_that_is_none_is_told_before_the_first_update(backend):
    with prepare(config(backend, checkpoint={"dir": __file__})) as engine:
        told = refused(train, engine, own_share(1))
        assert "cannot be read (Not a directory); give the folder that holds checkpoints" in told
