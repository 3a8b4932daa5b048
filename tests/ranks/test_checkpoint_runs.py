"""Runs that share a directory of checkpoints: which one is resumed, what a new one does to an older one, what retention
leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from playing import config, in_turn, my_rank, on_ranks, own_share, prepare, refused, train

from unishard.checkpoint import finding, manifest

OTHER = {"fsdp": "deepspeed", "deepspeed": "fsdp"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("runs"))


def names(root):
    return [found.name for found in finding.checkpoints(Path(root))]


def runs(root):
    return {found.name: manifest.read(found.path).run for found in finding.checkpoints(Path(root))}


def resumed(backend, root):
    """The same program three times, without a call that loads; the second time on the other engine, the third with a
    job killed at once."""
    found = []
    checkpoint = {"dir": f"{root}/{backend}-resumed", "every_steps": 2, "keep_last": 2, "on_existing": "resume"}
    for kind in (backend, OTHER[backend], backend):
        with prepare(config(kind, checkpoint=checkpoint)) as engine:
            engine.on_save(lambda: {"by": "the run"})
            found.append(engine.resumed and (engine.resumed.step, engine.resumed.state))
            if len(found) < 3:
                train(engine, own_share(5))
    return found, sorted(set(runs(f"{root}/{backend}-resumed").values()))


@in_turn
def test_the_config_alone_resumes_the_newest_checkpoint_and_its_run(backend, root):
    for found, ids in on_ranks(resumed, backend, root):
        assert found == [None, (4, {"by": "the run"}), (8, {"by": "the run"})]
        assert len(ids) == 1
        assert len(ids[0]) == 8
        assert names(f"{root}/{backend}-resumed") == ["step-00000006", "step-00000008"]


def begun_beside(backend, root):
    """A new run beside an older one, with the same steps; then the older one is continued, and the newer one."""
    folder = f"{root}/{backend}-beside"
    checkpoint = {"dir": folder, "every_steps": 1, "keep_last": 2, "on_existing": "new"}
    cfg = config(backend, checkpoint=checkpoint)
    with prepare(cfg) as engine:
        train(engine, own_share(3))
    with prepare(cfg) as engine:
        train(engine, own_share(3))
        resumed = engine.resumed
    newest, both = finding.latest(Path(folder)), runs(folder)
    with prepare(cfg) as engine:
        engine.load(f"{folder}/step-00000003")
        train(engine, own_share(1))
        older = finding.latest(Path(folder)), runs(folder)
    with prepare(cfg) as engine:
        begun = engine.load(newest).path
        train(engine, own_share(1))
    return (
        resumed,
        newest.name,
        both,
        older,
        begun == engine.resumed.path,
        finding.latest(Path(folder)).name,
        names(folder),
    )


@in_turn
def test_a_new_run_beside_an_older_one_replaces_and_deletes_nothing_of_it(backend, root):
    for resumed, newest, both, (older, then), same, latest, left in on_ranks(begun_beside, backend, root):
        assert resumed is None
        first, second = both["step-00000002"], both[newest]
        assert first != second
        mine = {f"step-0000000{step}-{second}": second for step in (2, 3)}
        assert both == {"step-00000002": first, "step-00000003": first} | mine
        assert newest == f"step-00000003-{second}"
        assert older.name == "step-00000004"
        assert then == {"step-00000003": first, "step-00000004": first} | mine
        assert same
        assert latest == f"step-00000004-{second}"
        assert left == ["step-00000003", newest, "step-00000004", latest]


def branched(backend, root):
    """Loads from another directory: a new run, for which the directory must be empty, or `on_existing: new`."""
    told = {}
    base, folder = f"{root}/{backend}-base", f"{root}/{backend}-branches"
    with prepare(config(backend)) as engine:
        train(engine, own_share(1))
        engine.save(base)
    for kind in ("error", "resume", "new", "error, before a save"):
        cfg = config(backend, checkpoint={"dir": folder, "on_existing": kind.partition(",")[0]})
        with prepare(cfg) as engine:
            told[kind] = engine.load(base).step, refused(train, engine, own_share(1)), refused(engine.save)
            if kind == "error":
                engine.load(base)
                told["again"] = refused(train, engine, own_share(1))
            if kind == "resume":
                engine.load("latest")
                told["after all"] = refused(train, engine, own_share(1))
        dist.barrier()
    return told, names(folder)


@in_turn
def test_loading_from_another_directory_is_a_new_run(backend, root):
    for told, left in on_ranks(branched, backend, root):
        assert told["error"] == (1, "nothing", "nothing")
        assert told["again"] == "nothing", "it has saved there itself"
        for kind in ("resume", "error, before a save"):
            step, update, save = told[kind]
            assert step == 1
            assert update == save
            assert f"{backend}-branches: holds checkpoints of another run, the newest of step " in update
            assert f"was loaded from {root}/{backend}-base/step-00000001; set checkpoint.on_existing to `new`" in update
        assert told["after all"] == "nothing"
        assert told["new"] == (1, "nothing", "nothing")
        assert left[0] == "step-00000002"
        assert len(left) == 2


def elsewhere(backend, root):
    """Saves in a directory of another run that the config does not name: what was trained is not lost, and neither is
    what was there."""
    folder = f"{root}/{backend}-elsewhere"
    saved = []
    for _ in range(2):
        with prepare(config(backend)) as engine:
            train(engine, own_share(1))
            saved += [engine.save(folder).name, engine.save(folder).name]
    with prepare(config(backend)) as engine:
        return saved, engine.load(folder).path.name


@in_turn
def test_a_save_into_the_directory_of_another_run_replaces_nothing(backend, root):
    for saved, newest in on_ranks(elsewhere, backend, root):
        assert saved[0] == saved[1] == "step-00000001"
        assert saved[2] == saved[3] == newest
        assert newest.startswith("step-00000001-")
        assert names(f"{root}/{backend}-elsewhere") == ["step-00000001", newest]


def without_runs(backend, root):
    """Resumes a run of an earlier version, whose manifests name no run and no number."""
    folder = f"{root}/{backend}-earlier"
    cfg = config(backend, checkpoint={"dir": folder, "every_steps": 1, "keep_last": 2})
    with prepare(cfg) as engine:
        train(engine, own_share(3))
    if my_rank() == 0:
        for found in finding.checkpoints(Path(folder)):
            facts = json.loads((found.path / manifest.FILE).read_text())
            for key in ("run", "commit", "crc32"):
                del facts[key]
            (found.path / manifest.FILE).write_text(json.dumps(facts))
    dist.barrier()
    with prepare(cfg) as engine:
        told = refused(train, engine, own_share(1))
        step = engine.load().step
        train(engine, own_share(1))
    return told, step, names(folder)


@in_turn
def test_a_run_of_an_earlier_version_is_resumed_as_one_run(backend, root):
    for told, step, left in on_ranks(without_runs, backend, root):
        assert "holds checkpoints of another run, the newest of step 3" in told
        assert step == 3
        assert left == ["step-00000003", "step-00000004"]


def judged(backend, root):
    """Saves with a metric after each update, which is best in the middle; a tensor on the device, and a run without
    one."""
    told = {}
    checkpoint = {"dir": f"{root}/{backend}-judged", "keep_last": 1, "keep_best": 1}
    with prepare(config(backend, checkpoint=checkpoint)) as engine:
        told["none"] = refused(engine.load, "best")
        for metric in (0.5, torch.tensor(0.25, device=engine.device), 1, None):
            train(engine, own_share(1))
            engine.save(metric=metric)
        told["word"] = refused(engine.save, metric="0.5")
        told["differs"] = refused(engine.save, metric=0.5 + my_rank())
        told["missing"] = refused(engine.save, metric=None if my_rank() else 0.5)
        left = {found.step: manifest.read(found.path).metric for found in finding.checkpoints(Path(checkpoint["dir"]))}
        best = engine.load("best").step
    with prepare(config(OTHER[backend], checkpoint=checkpoint | {"best": "max"})) as engine:
        return told, left, best, engine.load("best").step, engine.load("latest").step


@in_turn
def test_the_best_checkpoint_is_kept_and_loaded(backend, root):
    for told, left, best, highest, latest in on_ranks(judged, backend, root):
        assert "no checkpoint of the newest run has a metric; pass one, as in engine.save(metric=0.31)" in told["none"]
        assert (
            told["word"]
            == "ContractError: save: metric must be a number, got '0.5'; pass one such as engine.mean(loss)"
        )
        assert told["differs"].startswith(
            "RankMismatchError: save: the ranks pass different metrics: rank 0 has 0.5, rank 1 has 1.5; pass"
        )
        assert "rank 0 has 0.5, rank 1 has None" in told["missing"]
        assert left == {2: 0.25, 4: None}
        assert (best, highest, latest) == (2, 2, 4)


def unreadable(backend, root):
    """`checkpoint.dir` is a file, which is told before the first update."""
    with prepare(config(backend, checkpoint={"dir": __file__})) as engine:
        return refused(train, engine, own_share(1))


@in_turn
def test_a_directory_that_is_none_is_told_before_the_first_update(backend, root):
    for told in on_ranks(unreadable, backend, root):
        assert "cannot be read (Not a directory); give the folder that holds checkpoints" in told
