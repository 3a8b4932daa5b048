"""What goes on counting after a load: updates, minutes, the loss scale; and what a second look at a checkpoint
tells."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from playing import config, heard, in_turn, my_rank, on_ranks, own_share, prepare, refused, train

from unishard.checkpoint import directory, finding, lease, manifest, writing
from unishard.checkpoint.export import writing as exporting
from unishard.engine.state import autosave

OTHER = {"fsdp": "deepspeed", "deepspeed": "fsdp"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("counts"))


def steps(folder):
    return [found.step for found in finding.checkpoints(Path(folder))]


def resumed(backend, root):
    """Saves every third update, also after a resume; parameters that were frozen by hand train again as in the
    checkpoint."""
    place = {"dir": f"{root}/{backend}-every", "every_steps": 3}
    with prepare(config(backend, checkpoint=place)) as engine:
        train(engine, own_share(4))
        engine.save()
    with prepare(config(OTHER[backend], checkpoint=place)) as engine:
        engine.set_trainable("head", False)
        engine.load()
        trainable = engine.module.head.bias.requires_grad
        train(engine, own_share(5))
        return trainable, engine.load().step


@in_turn
def test_updates_and_trainability_go_on_from_the_checkpoint(backend, root):
    assert on_ranks(resumed, backend, root) == [(True, 9)] * 2
    assert steps(f"{root}/{backend}-every") == [3, 4, 6, 9]


def decoupled(backend, root):
    """Adam's state in AdamW, which keeps the same by the same names."""
    with prepare(config(backend, optimizer={"name": "adam", "lr": 0.01})) as engine:
        train(engine, own_share(1))
        folder = engine.save(f"{root}/{backend}-decoupled")
    with prepare(config(OTHER[backend], optimizer={"name": "adamw", "lr": 0.01, "weight_decay": 0})) as engine:
        return engine.load(folder).notes


@in_turn
def test_another_optimizer_with_the_same_state_is_told(backend, root):
    for notes in on_ranks(decoupled, backend, root):
        assert "the optimizer was Adam; using AdamW of the config" in notes


def scaled(backend, root):
    """A dynamic loss scale that has changed, one update before it changes again."""
    fp16 = {"compute": "fp16", "initial_loss_scale": 8.0, "loss_scale_growth_interval": 2}
    with prepare(config(backend, precision=fp16)) as engine:
        train(engine, own_share(3))
        folder = engine.save(f"{root}/{backend}-scale")
        train(engine, own_share(1))
        expected = engine.loss_scale
    with prepare(config(OTHER[backend], precision=fp16)) as engine:
        engine.load(folder)
        after = engine.loss_scale
        train(engine, own_share(1))
        return after, engine.loss_scale, expected


@in_turn
def test_a_loss_scale_goes_on_with_its_value_and_its_count(backend, root):
    assert on_ranks(scaled, backend, root) == [(16.0, 32.0, 32.0)] * 2


def by_the_clock(backend, root):
    """Saves every two minutes of a clock that only rank 0 reads, and that a save of the loop sets back."""
    clock = [0.0]
    autosave.time.monotonic, true = lambda: clock[0] if my_rank() == 0 else 0.0, autosave.time.monotonic
    try:
        with prepare(config(backend, checkpoint={"dir": f"{root}/{backend}-clock", "every_minutes": 2})) as engine:
            for minute, micro_batch in enumerate(own_share(7), 1):
                clock[0] = 60.0 * minute
                engine.backward(engine(**micro_batch).loss)
                engine.step()
                if minute == 3:
                    engine.save()
    finally:
        autosave.time.monotonic = true


@in_turn
def test_minutes_count_from_the_last_save(backend, root):
    on_ranks(by_the_clock, backend, root)
    assert steps(f"{root}/{backend}-clock") == [2, 3, 5, 7]


def replaced(backend, root):
    """Saves twice at one step, in the background, and looks whether every bit is as its hash says, with a manifest that
    lies."""
    cfg = config(backend, checkpoint={"dir": f"{root}/{backend}-twice", "async_save": True})
    with prepare(cfg) as engine:
        engine.save(state="first")
        folder = engine.save(state="second")
        state = engine.load().state
        again = engine.load(folder, verify="bits").state
        dist.barrier()
        if my_rank() == 0:
            facts = json.loads((folder / manifest.FILE).read_text())
            facts["tensors"]["model.inp.weight"]["hash"] = "0" * 16
            del facts["crc32"]
            (folder / manifest.FILE).write_text(json.dumps(facts))
        dist.barrier()
        return state, again, refused(engine.load, folder), refused(engine.load, folder, verify="bits")


@in_turn
def test_the_second_save_of_a_step_counts_and_wrong_bits_are_found(backend, root):
    for state, again, files, bits in on_ranks(replaced, backend, root):
        assert state == again == "second"
        assert files == "nothing"
        assert "tensors differ from what was saved, such as model.inp.weight" in bits
    assert steps(f"{root}/{backend}-twice") == [0]


def failing(backend, root):
    """A save in the background fails on one rank, and the engine is closed, waited for, or used for something else."""
    record, told = writing.envelope_of, {}

    def no_space(values):
        raise OSError(28, "No space left on device")

    def closed():
        with begun():
            pass

    def begun():
        engine = prepare(config(backend, checkpoint={"dir": f"{root}/{backend}-failing", "async_save": True}))
        engine.save()
        return engine

    if my_rank():
        writing.envelope_of = no_space
    with heard(level=logging.ERROR) as lines:
        told["closed"] = refused(closed)
        engine = begun()
        told["waited"] = refused(engine.wait), refused(engine.wait), refused(engine.close)
        engine = begun()
        told["exported"] = refused(engine.export, f"{root}/{backend}-export"), refused(engine.close)
    writing.envelope_of = record
    return told, lines


@in_turn
def test_a_failure_in_the_background_is_raised_once_everywhere_and_logged_at_once(backend, root):
    for rank, (told, lines) in enumerate(on_ranks(failing, backend, root)):
        assert "rank 1 could not write its shards" in told["closed"]
        assert "rank 1 could not write its shards" in told["waited"][0]
        assert told["waited"][1:] == ("nothing", "nothing")
        assert told["exported"][0] == "nothing"
        assert "rank 1 could not write its shards" in told["exported"][1]
        assert len([line for line in lines if line.startswith("the save in the background failed: ")]) == (
            0 if rank else 3
        )
    assert steps(f"{root}/{backend}-failing") == []


def elsewhere(backend, root):
    """Without the desync check, rank 1 is told of another directory."""
    cfg = config(backend, communication={"desync_check": False})
    mine = f"{root}/{backend}-elsewhere" + str(my_rank())
    with prepare(cfg) as engine:
        train(engine, own_share(1))
        return str(engine.save(mine)), engine.load(mine).step, refused(engine.load, f"{root}/none{my_rank()}")


@in_turn
def test_rank_0_says_where_if_nobody_looks_whether_the_ranks_agree(backend, root):
    for folder, step, told in on_ranks(elsewhere, backend, root):
        assert folder == f"{root}/{backend}-elsewhere0/step-00000001"
        assert step == 1
        assert f"{root}/none0" in told


def raised(call, *arguments, **named):
    """What a call raised, of whatever kind, or `nothing`."""
    try:
        call(*arguments, **named)
    except BaseException as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing"


def stopped(what):
    """A function in place of one that a save calls."""

    def stop(*arguments, **named):
        raise what

    return stop


def interrupted(backend, root):
    """Somebody presses Ctrl-C while rank 0 writes its tensors; an exit comes while it writes the manifest, and one
    while it exports."""
    folder, told = f"{root}/{backend}-pressed", {}
    with prepare(config(backend)) as engine:
        with pytest.MonkeyPatch.context() as patch:
            if not my_rank():
                patch.setattr(writing, "envelope_of", stopped(KeyboardInterrupt()))
            told["tensors"] = raised(engine.save, folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(directory, "write_manifest", stopped(SystemExit(3)))
            told["manifest"] = raised(engine.save, folder)
        left = [path.name for path in Path(folder).iterdir() if path.name != lease.FILE]
        with pytest.MonkeyPatch.context() as patch:
            if not my_rank():
                patch.setattr(exporting, "_put", stopped(KeyboardInterrupt()))
            told["export"] = raised(engine.export, f"{folder}-export")
        dist.barrier()
        engine.save(folder)
        with pytest.MonkeyPatch.context() as patch:
            if my_rank():
                patch.setattr(manifest, "read", stopped(SystemExit(3)))
            told["load"] = raised(engine.load, folder)
        engine.load(folder)
    return told, left


@in_turn
def test_an_interrupt_on_one_rank_ends_the_save_on_all_and_leaves_nothing(backend, root):
    first, second = [told for told, _ in on_ranks(interrupted, backend, root)]
    assert first["tensors"] == first["export"] == "KeyboardInterrupt: "
    assert second["tensors"].startswith("CheckpointError: ")
    assert second["tensors"].endswith("rank 0 could not write its shards: KeyboardInterrupt")
    assert (first["manifest"], second["manifest"]) == (
        "SystemExit: 3",
        "CheckpointError: rank 0: interrupted by SystemExit",
    )
    assert second["export"] == "CheckpointError: rank 0: interrupted by KeyboardInterrupt"
    assert (first["load"], second["load"]) == ("CheckpointError: rank 1: interrupted by SystemExit", "SystemExit: 3")
    assert [left for _, left in on_ranks(interrupted, backend, root)] == [[], []]
    assert not list(Path(root).glob("*-pressed-export"))
    assert steps(f"{root}/{backend}-pressed") == [0]


def pressed(backend, root):
    """A real Ctrl-C on rank 1 while it writes: once, which the save outlives, and twice, where the user does not
    wait."""
    folder, told = f"{root}/{backend}-keys", []
    record, before = writing.envelope_of, signal.signal(signal.SIGINT, signal.default_int_handler)

    def press(times):
        def pressing(values):
            writing.envelope_of = record
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
            return record(values)

        return pressing

    try:
        with prepare(config(backend)) as engine:
            for times in (1, 2):
                if my_rank():
                    writing.envelope_of = press(times)
                told.append(raised(engine.save, folder, state=times))
            dist.barrier()
            return told, engine.load(folder).state, signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        writing.envelope_of = record
        signal.signal(signal.SIGINT, before)


@in_turn
def test_ctrl_c_waits_for_the_save_unless_it_is_pressed_twice(backend, root):
    (first, state, _), (second, _, restored) = on_ranks(pressed, backend, root)
    assert first[0] == "nothing"
    assert second == ["KeyboardInterrupt: "] * 2
    assert first[1].endswith("rank 1 could not write its shards: KeyboardInterrupt")
    assert (state, restored) == (1, True)
