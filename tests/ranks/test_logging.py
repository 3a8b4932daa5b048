"""What the engine logs: its own values are those of the updates, the user's stand beside them, and a resumed run has no
step twice."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
from harness import BACKENDS, config, in_turn, my_rank, on_ranks, own_share, prepare, raised, refused, train

from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.engine.model.shape import shape_of
from unishard.observe.destinations import table
from unishard.observe.throughput import flops_per_token
from unishard.testing.models import MODELS

everywhere = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("logs"))


def logging(backend, root, name, every=1, to=("jsonl",)):
    return {"to": list(to), "every_steps": every, "dir": f"{root}/{backend}-{name}"}


def lines(backend, root, name):
    return [json.loads(line) for line in Path(root, f"{backend}-{name}", "log.jsonl").read_text().splitlines()]


def close(one, other):
    return one == pytest.approx(other, rel=1e-6)


# -- the engine's own values -----------------------------------------------------------------------


def measured(backend, root):
    """Five windows of two micro-batches, the last of one, with and without logs."""
    sections = {"training": {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}}
    with prepare(config(backend, logging=logging(backend, root, "measured", every=2), **sections)) as engine:
        logged = train(engine, own_share(9))
    with prepare(config(backend, **sections)) as engine:
        return logged, train(engine, own_share(9))


@everywhere
def test_values_are_those_of_the_updates_and_training_stays_bit_equal(backend, root):
    logged, plain = on_ranks(measured, backend, root)[0]
    assert logged == plain
    found = lines(backend, root, "measured")
    assert [line["step"] for line in found] == [2, 4]
    for line, micro_batches in zip(found, (logged[:4], logged[4:8]), strict=True):
        assert close(line["loss"], sum(loss for loss, _ in micro_batches) / 4)
        last = micro_batches[-1][1]
        assert (line["grad_norm"], line["lr"]) == (last.grad_norm, last.lr)
        assert line["samples_per_second"] > 0
        assert line["memory_gib"] > 0
        assert line["skipped_updates"] == 0
        assert "tokens_per_second" not in line, "an MLP has none"
        assert "mfu" not in line, "a CPU's peak is unknown"
        assert close(line["sent_gib"] * 2**30, planned_to_send(backend))


def modules(backend, root):
    """Two updates with recomputation, whose second has its modules measured, and the same without."""
    sections = {
        "training": {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
        "activation_checkpointing": "full",
    }
    logged = logging(backend, root, "modules") | {"module_steps": [2]}
    with prepare(config(backend, logging=logged, **sections)) as engine:
        measured, hooks = (
            train(engine, own_share(6)),
            sum(len(module._forward_hooks) for module in engine.module.modules()),
        )
        own = engine.module.blocks[1].up
    with prepare(config(backend, **sections)) as engine:
        return measured, train(engine, own_share(6)), hooks, len(own._forward_hooks)


@everywhere
def test_modules_are_measured_and_training_stays_bit_equal(backend, root):
    measured, plain, *_ = on_ranks(modules, backend, root)[0]
    assert measured == plain
    rows = [json.loads(line) for line in Path(root, f"{backend}-modules", "modules.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {2}
    found = {row["module"]: row for row in rows if "module" in row}
    assert list(found)[:5] == ["inp", "blocks.0.norm", "blocks.0.up", "blocks.0.down", "blocks.0"]
    assert list(found)[-2:] == ["head", ""]
    assert (
        found["head"]["backward_order"] < found["blocks.0"]["backward_order"] < found["blocks.0.up"]["backward_order"]
    )
    norms = [row["gradient_norm"] for row in rows if "parameter" in row]
    assert close(sum(norm**2 for norm in norms) ** 0.5, measured[3][1].grad_norm)
    on_ranks(modules, BACKENDS[0], root)
    other = [
        json.loads(line) for line in Path(root, f"{BACKENDS[0]}-modules", "modules.jsonl").read_text().splitlines()
    ]
    for mine, theirs in zip(rows, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value == (
                pytest.approx(theirs[name], rel=1e-5, abs=1e-7) if isinstance(value, float) else theirs[name]
            ), mine


def planned_to_send(backend):
    """Bytes by the formulas of the plan."""
    cfg = config(backend, training={"gradient_accumulation_steps": 2, "gradient_clipping": 1.0})
    shape = shape_of(MODELS["mlp"].build(), cfg.sharding)
    return sum(each.sent() for each in registry.get(backend).footprint(shape, cfg, Topology(2, 2)).traffic)


def weighted(backend, root):
    """Losses that are sums over items, whose counts differ between ranks; a window that is discarded."""
    with prepare(config(backend, logging=logging(backend, root, "weighted"))) as engine:
        sums = []
        for turn, micro_batch in enumerate(engine.batches(own_share(3))):
            items = 1 + my_rank() + turn
            loss = engine(**micro_batch).loss * items
            engine.backward(loss, num_items=items)
            if turn == 1:
                engine.discard()
            else:
                sums.append((2 * engine.mean(loss), 2 * engine.mean(float(items))))
                engine.step()
        return sums


@in_turn
def test_a_loss_over_items_is_their_mean(backend, root):
    sums = on_ranks(weighted, backend, root)[0]
    found = lines(backend, root, "weighted")
    assert [line["step"] for line in found] == [1, 2]
    for line, (total, items) in zip(found, sums, strict=True):
        assert close(line["loss"], total / items)


def skipped(backend, root):
    with prepare(config(backend, logging=logging(backend, root, "skipped"))) as engine:
        for turn, micro_batch in enumerate(engine.batches(own_share(3))):
            engine.backward(engine(**micro_batch).loss * (float("nan") if turn == 1 else 1))
            engine.step()


@in_turn
def test_skipped_updates_are_counted(backend, root):
    on_ranks(skipped, backend, root)
    found = lines(backend, root, "skipped")
    assert [line["skipped_updates"] for line in found] == [0, 1, 1]
    assert found[1]["loss"] is None
    assert found[1]["grad_norm"] is None


def paused(backend, root):
    """An evaluation and a save before the first update, and a save inside an evaluation."""
    cfg = config(backend, logging=logging(backend, root, "paused"))
    with prepare(cfg) as engine:
        engine.eval()
        time.sleep(0.3)
        engine.train()
        for micro_batch in engine.batches(own_share(2)):
            engine.backward(engine(**micro_batch).loss)
            engine.step()
            engine.eval()
            engine.save(f"{root}/{backend}-paused-saved")
            time.sleep(0.3)
            engine.train()


@in_turn
def test_evaluations_and_saves_are_left_out_of_the_throughput_once(backend, root):
    on_ranks(paused, backend, root)
    assert [0.1 < line["samples_per_second"] < 1e5 for line in lines(backend, root, "paused") if "loss" in line] == [
        True,
        True,
    ]


def tokens(backend, root):
    section = logging(backend, root, "tokens")
    with prepare(config(backend, logging=section, optimizer={"name": "adamw"}), "llama") as engine:
        train(engine, own_share(2, "llama"))
        return flops_per_token(engine._adapter)


@in_turn
def test_a_language_model_has_tokens_per_second_and_flops_of_the_formula(backend, root):
    flops = on_ranks(tokens, backend, root)[0]
    model = __import__("unishard.testing.models", fromlist=["MODELS"]).MODELS["llama"].build()
    head = model.get_output_embeddings().weight
    tables = {model.get_input_embeddings().weight} - {head}
    count = sum(parameter.numel() for parameter in model.parameters() if parameter not in tables)
    assert flops == (6 * count, 12 * model.config.num_hidden_layers * model.config.hidden_size)
    for line in lines(backend, root, "tokens"):
        assert line["tokens_per_second"] > line["samples_per_second"] > 0


# -- the user's values -----------------------------------------------------------------------------


def own_values(backend, root):
    """One rank logs more than the other, an evaluation after the step of a record and its save, and values after the
    last record."""
    section = logging(backend, root, "own", every=2)
    cfg = config(backend, logging=section, checkpoint={"dir": f"{root}/{backend}-own-saved", "every_steps": 2})
    with prepare(cfg) as engine:
        for turn, micro_batch in enumerate(engine.batches(own_share(5)), 1):
            loss = engine(**micro_batch).loss
            engine.backward(loss)
            engine.step()
            engine.log(turn=turn, mine=loss.detach())
            if engine.is_main:
                engine.log(main=1.0)
            if turn == 2:
                engine.eval()
                engine.log(**{"eval/loss": 0.25})
                engine.train()
        return refused(engine.log, loss=1.0), refused(engine.log, word="x"), refused(engine.log, many=loss.new_zeros(2))


@in_turn
def test_own_values_stand_with_the_step_that_has_just_ended(backend, root):
    answers = on_ranks(own_values, backend, root)
    assert answers[0] == answers[1]
    assert answers[0] == (
        "ContractError: log: loss is a value that the engine logs itself; choose another name, such as my_loss",
        "ContractError: log: word must be a number or a tensor with one, got 'x'",
        "ContractError: log: many must be one number, got a tensor of shape (2,); pass its mean, many.mean()",
    )
    found = {}
    for line in lines(backend, root, "own"):
        assert not found.get(line["step"], {}).keys() & (line.keys() - {"step"}), "no value twice"
        found.setdefault(line["step"], {}).update(line)
    assert list(found) == [2, 4, 5]
    assert (found[2]["eval/loss"], found[2]["main"]) == (0.25, 1.0)
    assert [found[step]["turn"] for step in (2, 4, 5)] == [1.5, 3.5, 5]
    assert found[2]["checkpoint_seconds"] > 0
    assert "mine" in found[4]


# -- resuming --------------------------------------------------------------------------------------


def resumed(backend, root):
    """A run that ends at step 5 and has saved step 4; the same program resumes it."""
    section = logging(backend, root, "resumed")
    for count in (5, 7):
        checkpoint = {"dir": f"{root}/{backend}-saved", "every_steps": 2, "on_existing": "resume"}
        with prepare(config(backend, checkpoint=checkpoint, logging=section)) as engine:
            train(engine, own_share(count))


@in_turn
def test_a_resumed_run_has_each_step_once(backend, root):
    on_ranks(resumed, backend, root)
    found = [line["step"] for line in lines(backend, root, "resumed") if "loss" in line]
    assert found == list(range(1, 12))


# -- nothing asked ---------------------------------------------------------------------------------


def unasked(backend, root):
    """The functions of logging that a step calls where `logging` is not set."""
    called = []

    def profile(frame, event, argument):
        if event == "call" and re.search(r"/observe/(recorder|throughput|destinations/)", frame.f_code.co_filename):
            called.append(frame.f_code.co_name)

    with prepare(config(backend)) as engine:
        train(engine, own_share(1))
        sys.setprofile(profile)
        try:
            train(engine, own_share(2))
            engine.log(accuracy=1.0)
        finally:
            sys.setprofile(None)
    return called


@in_turn
def test_a_step_without_logging_calls_nothing_of_it(backend, root):
    assert on_ranks(unasked, backend, root) == [[], []]


def missing(backend, root):
    find_spec, table.find_spec = table.find_spec, lambda name: None
    try:
        prepare(config(backend, logging=logging(backend, root, "missing", to=["tensorboard"])))
    finally:
        table.find_spec = find_spec


def unwritable(backend, root):
    Path(root, f"{backend}-file").touch()
    prepare(config(backend, logging={"to": ["jsonl"], "dir": f"{root}/{backend}-file/logs"}))


@in_turn
def test_what_cannot_be_written_is_an_error_of_prepare(backend, root):
    needs = "tensorboard needs the package tensorboard; pip install 'unishard[tensorboard]', or remove tensorboard"
    assert raised(missing, backend, root) == f"ConfigError: logging.to: {needs}"
    assert raised(unwritable, backend, root).startswith(
        "ConfigError: logging.to: jsonl cannot be started: NotADirectoryError"
    )
