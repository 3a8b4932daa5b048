"""What goes on counting after a load: updates, minutes, the loss scale; and what a second look at a checkpoint
tells."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from harness import EACH, OTHER, caught, config, heard, in_ranks, my_rank, own_share, prepare, refused, steps, train

from dev.ranks.interception import stopped
from unishard.checkpoint import directory, lease, manifest, writing
from unishard.checkpoint.export import writing as exporting
from unishard.engine.state import autosave


@in_ranks(cells=EACH, in_turn=True)
def test_updates_and_trainability_go_on_from_the_checkpoint(backend, root):
    """Saves every third update, also after a resume; parameters that were frozen by hand train again as in the
    checkpoint."""
    place = {"dir": root, "every_steps": 3}
    with prepare(config(backend, checkpoint=place)) as engine:
        train(engine, own_share(4))
        engine.save()
    with prepare(config(OTHER[backend], checkpoint=place)) as engine:
        engine.weights.set_trainable("head", False)
        engine.load()
        assert engine.module.head.bias.requires_grad
        train(engine, own_share(5))
        assert engine.load().step == 9
    assert steps(root) == [3, 4, 6, 9]


@in_ranks(cells=EACH, in_turn=True)
def test_another_optimizer_with_the_same_state_is_told(backend, root):
    """Adam's state in AdamW, which keeps the same by the same names."""
    with prepare(config(backend, "no_shard", optimizer={"name": "adam", "lr": 0.01})) as engine:
        train(engine, own_share(1))
        folder = engine.save(root)
    with prepare(
        config(OTHER[backend], "no_shard", optimizer={"name": "adamw", "lr": 0.01, "weight_decay": 0})
    ) as engine:
        assert "the optimizer was Adam; using AdamW of the config" in engine.load(folder).notes


@in_ranks(cells=EACH, in_turn=True)
def test_a_loss_scale_goes_on_with_its_value_and_its_count(backend, root):
    """A dynamic loss scale that has changed, one update before it changes again."""
    fp16 = {"compute": "fp16", "initial_loss_scale": 8.0, "loss_scale_growth_interval": 2}
    with prepare(config(backend, precision=fp16)) as engine:
        train(engine, own_share(3))
        folder = engine.save(root)
        train(engine, own_share(1))
        assert engine.gradients.loss_scale == 32.0
    with prepare(config(OTHER[backend], precision=fp16)) as engine:
        engine.load(folder)
        assert engine.gradients.loss_scale == 16.0
        train(engine, own_share(1))
        assert engine.gradients.loss_scale == 32.0


@in_ranks(cells=EACH, in_turn=True)
def test_minutes_count_from_the_last_save(backend, root, monkeypatch):
    """Saves every two minutes of a clock that only rank 0 reads, and that a save of the loop sets back."""
    clock = [0.0]
    monkeypatch.setattr(autosave, "time", SimpleNamespace(monotonic=lambda: clock[0] if my_rank() == 0 else 0.0))
    with prepare(config(backend, "no_shard", checkpoint={"dir": root, "every_minutes": 2})) as engine:
        for minute, micro_batch in enumerate(own_share(7), 1):
            clock[0] = 60.0 * minute
            engine.backward(engine(**micro_batch).loss)
            engine.step()
            if minute == 3:
                engine.save()
    assert steps(root) == [2, 3, 5, 7]


@in_ranks(cells=EACH, in_turn=True)
def test_the_second_save_of_a_step_counts_and_wrong_bits_are_found(backend, root):
    """Saves twice at one step, in the background, and looks whether every bit is as its hash says, with a manifest that
    lies."""
    with prepare(config(backend, "no_shard", checkpoint={"dir": root, "async_save": True})) as engine:
        engine.save(state="first")
        folder = engine.save(state="second")
        assert engine.load().state == engine.load(folder, verify="bits").state == "second"
        dist.barrier()
        if my_rank() == 0:
            facts = json.loads((folder / manifest.FILE).read_text())
            facts["tensors"]["model.inp.weight"]["hash"] = "0" * 16
            del facts["crc32"]
            (folder / manifest.FILE).write_text(json.dumps(facts))
        dist.barrier()
        assert refused(engine.load, folder) == "nothing"
        told = refused(engine.load, folder, verify="bits")
        assert "tensors differ from what was saved, such as model.inp.weight" in told
    assert steps(root) == [0]


@in_ranks(cells=EACH, in_turn=True)
def test_a_failure_in_the_background_is_raised_once_everywhere_and_logged_at_once(backend, root, monkeypatch):
    """A save in the background fails on one rank, and the engine is closed, waited for, or used for something else."""

    def closed():
        with begun():
            pass

    def begun():
        engine = prepare(config(backend, "no_shard", checkpoint={"dir": f"{root}/runs", "async_save": True}))
        engine.save()
        return engine

    wrong = "rank 1 could not write its shards"
    if my_rank():
        monkeypatch.setattr(writing, "envelope_of", stopped(OSError(28, "No space left on device")))
    with heard(level=logging.ERROR) as lines:
        assert wrong in refused(closed)
        engine = begun()
        assert wrong in refused(engine.wait)
        assert [refused(engine.wait), refused(engine.close)] == ["nothing"] * 2
        engine = begun()
        assert refused(engine.export, f"{root}/export") == "nothing"
        assert wrong in refused(engine.close)
    logged = [line for line in lines if line.startswith("the save in the background failed: ")]
    assert len(logged) == (0 if my_rank() else 3)
    assert steps(f"{root}/runs") == []


@in_ranks(cells=EACH, in_turn=True)
def test_rank_0_says_where_if_nobody_looks_whether_the_ranks_agree(backend, root):
    """Without the desync check, rank 1 is told of another directory."""
    mine = f"{root}/elsewhere{my_rank()}"
    with prepare(config(backend, "no_shard")) as engine:
        train(engine, own_share(1))
        assert str(engine.save(mine)) == f"{root}/elsewhere0/step-00000001"
        assert engine.load(mine).step == 1
        assert f"{root}/none0" in refused(engine.load, f"{root}/none{my_rank()}")


def raised(call, *arguments, **named):
    """What a call raised, of whatever kind, or `nothing`."""
    return caught(BaseException, call, *arguments, **named)


@in_ranks(cells=EACH, in_turn=True)
def test_an_interrupt_on_one_rank_ends_the_save_on_all_and_leaves_nothing(backend, root):
    """Somebody presses Ctrl-C while rank 0 writes its tensors; an exit comes while it writes the manifest, and one
    while it exports."""
    folder, rank = f"{root}/pressed", my_rank()

    def interrupted(where, name, what, victims, call, place):
        with pytest.MonkeyPatch.context() as patch:
            if rank in victims:
                patch.setattr(where, name, stopped(what))
            return raised(call, place)

    with prepare(config(backend, "no_shard")) as engine:
        told = interrupted(writing, "envelope_of", KeyboardInterrupt(), [0], engine.save, folder)
        assert told.startswith("CheckpointError: " if rank else "KeyboardInterrupt: ")
        assert told.endswith("rank 0 could not write its shards: KeyboardInterrupt" if rank else "KeyboardInterrupt: ")
        told = interrupted(directory, "write_manifest", SystemExit(3), [0, 1], engine.save, folder)
        assert told == ("CheckpointError: rank 0: interrupted by SystemExit" if rank else "SystemExit: 3")
        assert [path.name for path in Path(folder).iterdir() if path.name != lease.FILE] == []
        told = interrupted(exporting, "_put", KeyboardInterrupt(), [0], engine.export, f"{folder}-export")
        interrupt = "CheckpointError: rank 0: interrupted by KeyboardInterrupt"
        assert told == (interrupt if rank else "KeyboardInterrupt: ")
        dist.barrier()
        assert not Path(f"{folder}-export").exists()
        engine.save(folder)
        told = interrupted(manifest, "read", SystemExit(3), [1], engine.load, folder)
        assert told == ("SystemExit: 3" if rank else "CheckpointError: rank 1: interrupted by SystemExit")
        engine.load(folder)
    assert steps(folder) == [0]


@in_ranks(cells=EACH, in_turn=True)
def test_ctrl_c_waits_for_the_save_unless_it_is_pressed_twice(backend, root, monkeypatch):
    """A real Ctrl-C on rank 1 while it writes: once, which the save outlives, and twice, where the user does not
    wait."""
    record, told = writing.envelope_of, []
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def press(times):
        def pressing(values):
            monkeypatch.setattr(writing, "envelope_of", record)
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            return record(values)

        return pressing

    with prepare(config(backend, "no_shard")) as engine:
        for times in (1, 2):
            if my_rank():
                monkeypatch.setattr(writing, "envelope_of", press(times))
            told.append(raised(engine.save, root, state=times))
        dist.barrier()
        assert engine.load(root).state == 1
    if my_rank() == 0:
        assert told[0] == "nothing"
        assert told[1].endswith("rank 1 could not write its shards: KeyboardInterrupt")
    else:
        assert told == ["KeyboardInterrupt: "] * 2
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
