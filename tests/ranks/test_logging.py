"""What the engine logs: its own values are those of the updates, the user's stand beside them, and a resumed run has no
step twice."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import (
    BACKENDS,
    EACH,
    config,
    heard,
    in_ranks,
    my_rank,
    own_share,
    prepare,
    refused,
    share,
    train,
    update,
)

import unishard
from unishard.config.topology import Topology
from unishard.contract import registry
from unishard.engine.model.shape import shape_of
from unishard.observe.destinations import table
from unishard.observe.throughput import flops_per_token
from unishard.testing.models import MODELS, llama

WINDOWS = {"training": {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}}


def logging(root, every=1, to=("jsonl",)):
    return {"to": list(to), "every_steps": every, "dir": root}


def lines(root, name="log"):
    """What rank 0 has written."""
    if dist.is_initialized():
        dist.barrier()
    return [json.loads(line) for line in Path(root, f"{name}.jsonl").read_text().splitlines()]


def close(one, other):
    return one == pytest.approx(other, rel=1e-6)


# -- the engine's own values -----------------------------------------------------------------------


@in_ranks(cells=EACH, in_turn=True)
def test_values_are_those_of_the_updates_and_training_stays_bit_equal(backend, root):
    """Five windows of two micro-batches, the last of one, with and without logs."""
    with prepare(config(backend, logging=logging(root, every=2), **WINDOWS)) as engine:
        logged = train(engine, own_share(9))
    with prepare(config(backend, **WINDOWS)) as engine:
        assert train(engine, own_share(9)) == logged
    found = lines(root)
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


@in_ranks
def test_modules_are_measured_and_training_stays_bit_equal(root):
    """Two updates with recomputation, whose second has its modules measured, and the same without; the engines measure
    the same."""
    measured = {}
    for backend in BACKENDS:
        sections = WINDOWS | {"activation_checkpointing": "full"}
        logged = logging(f"{root}/{backend}") | {"module_steps": [2]}
        with prepare(config(backend, logging=logged, **sections)) as engine:
            trained = train(engine, own_share(6))
        with prepare(config(backend, **sections)) as engine:
            assert train(engine, own_share(6)) == trained
        rows = measured[backend] = lines(f"{root}/{backend}", "modules")
        assert {row["step"] for row in rows} == {2}
        found = {row["module"]: row for row in rows if "module" in row}
        assert list(found)[:5] == ["inp", "blocks.0.norm", "blocks.0.up", "blocks.0.down", "blocks.0"]
        assert list(found)[-2:] == ["head", ""]
        order = [found[name]["backward_order"] for name in ("head", "blocks.0", "blocks.0.up")]
        assert order == sorted({*order})
        norms = [row["gradient_norm"] for row in rows if "parameter" in row]
        assert close(sum(norm**2 for norm in norms) ** 0.5, trained[3][1].grad_norm)
    for mine, theirs in zip(*measured.values(), strict=True):
        assert mine == {
            name: pytest.approx(value, rel=1e-5, abs=1e-7) if isinstance(value, float) else value
            for name, value in theirs.items()
        }


def planned_to_send(backend):
    """Bytes by the formulas of the plan."""
    cfg = config(backend, **WINDOWS)
    shape = shape_of(MODELS["mlp"].build(), cfg.sharding)
    return sum(each.sent() for each in registry.get(backend).footprint(shape, cfg, Topology(2, 2)).traffic)


@in_ranks(cells=EACH, in_turn=True)
def test_a_loss_over_items_is_their_mean(backend, root):
    """Losses that are sums over items, whose counts differ between ranks; a window that is discarded."""
    with prepare(config(backend, "no_shard", logging=logging(root))) as engine:
        sums = []
        for turn, micro_batch in enumerate(engine.batches(own_share(3))):
            items = 1 + my_rank() + turn
            loss = engine(**micro_batch).loss * items
            engine.backward(loss, num_items=items)
            if turn == 1:
                engine.discard()
            else:
                sums.append(engine.mean(loss) / engine.mean(float(items)))
                engine.step()
    assert [(line["step"], line["loss"]) for line in lines(root)] == [
        (step, pytest.approx(mean, rel=1e-6)) for step, mean in enumerate(sums, 1)
    ]


@in_ranks(cells=EACH, in_turn=True)
def test_skipped_updates_are_counted(backend, root):
    with prepare(config(backend, "no_shard", logging=logging(root))) as engine:
        for turn, micro_batch in enumerate(engine.batches(own_share(3))):
            engine.backward(engine(**micro_batch).loss * (float("nan") if turn == 1 else 1))
            engine.step()
    found = lines(root)
    assert [line["skipped_updates"] for line in found] == [0, 1, 1]
    assert found[1]["loss"] is None
    assert found[1]["grad_norm"] is None


@in_ranks(cells=EACH, in_turn=True)
def test_evaluations_and_saves_are_left_out_of_the_throughput_once(backend, root):
    """An evaluation and a save before the first update, and a save inside an evaluation."""
    with prepare(config(backend, "no_shard", logging=logging(root))) as engine:
        engine.eval()
        time.sleep(0.3)
        engine.train()
        for micro_batch in engine.batches(own_share(2)):
            update(engine, micro_batch)
            engine.eval()
            engine.save(f"{root}/saved")
            time.sleep(0.3)
            engine.train()
    speeds = [line["samples_per_second"] for line in lines(root) if "loss" in line]
    assert [0.1 < speed < 1e5 for speed in speeds] == [True, True]


@in_ranks(cells=EACH, in_turn=True)
def test_a_language_model_has_tokens_per_second_and_flops_of_the_formula(backend, root):
    with prepare(config(backend, logging=logging(root), optimizer={"name": "adamw"}), "llama") as engine:
        train(engine, own_share(2, "llama"))
        flops = flops_per_token(engine._adapter)
    model = MODELS["llama"].build()
    head = model.get_output_embeddings().weight
    tables = {model.get_input_embeddings().weight} - {head}
    count = sum(parameter.numel() for parameter in model.parameters() if parameter not in tables)
    assert flops == (6 * count, 12 * model.config.num_hidden_layers * model.config.hidden_size)
    for line in lines(root):
        assert line["tokens_per_second"] > line["samples_per_second"] > 0


@in_ranks(cells=(("",), ("sequence",), ("tensor",)))
def test_samples_and_tokens_that_ranks_share_count_once(key, root):
    parallel = {"parallel": {key: 2}} if key else {}
    cfg = config("fsdp", logging=logging(root), optimizer={"name": "adamw"}, **parallel)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 42}
    data = share(1, rank=0, world=1, model="llama") if key else own_share(1, "llama")
    data = [{name: values[:, :10] for name, values in each.items()} for each in data]  # it needs no padding
    with unishard.prepare(llama(**sizes), cfg) as engine:
        train(engine, data)
    (line,) = lines(root)
    samples, length = data[0]["input_ids"].shape
    groups = 1 if key else 2
    assert line["samples_per_second"] * line["step_seconds"] == pytest.approx(samples * groups)
    assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(samples * length * groups)


# -- the user's values -----------------------------------------------------------------------------


@in_ranks(cells=EACH, in_turn=True)
def test_own_values_stand_with_the_step_that_has_just_ended(backend, root):
    """One rank logs more than the other, an evaluation after the step of a record and its save, and values after the
    last record."""
    checkpoint = {"dir": f"{root}/saved", "every_steps": 2}
    with prepare(config(backend, "no_shard", logging=logging(root, every=2), checkpoint=checkpoint)) as engine:
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
        engine.save()
        assert [
            refused(engine.log, **each) for each in ({"loss": 1.0}, {"word": "x"}, {"many": loss.new_zeros(2)})
        ] == [
            "ContractError: log: loss is a value that the engine logs itself; choose another name, such as my_loss",
            "ContractError: log: word must be a number or a tensor with one, got 'x'",
            "ContractError: log: many must be one number, got a tensor of shape (2,); pass its mean, many.mean()",
        ]
        engine.log(last=0.75)
        engine.load()
    found = {}
    for line in lines(root):
        assert not found.get(line["step"], {}).keys() & (line.keys() - {"step"}), "no value twice"
        found.setdefault(line["step"], {}).update(line)
    assert list(found) == [2, 4, 5]
    assert found[5]["last"] == 0.75, "before a load"
    assert (found[2]["eval/loss"], found[2]["main"]) == (0.25, 1.0)
    assert [found[step]["turn"] for step in (2, 4, 5)] == [1.5, 3.5, 5]
    assert found[2]["checkpoint_seconds"] > 0
    assert "mine" in found[4]


@in_ranks(cells=EACH, in_turn=True)
def test_values_that_are_written_nowhere_are_said_once(backend, root):
    said = []
    for sections in ({}, {"logging": {"to": []}}):
        with prepare(config(backend, **sections)) as engine, heard() as lines:
            engine.log(accuracy=0.5)
            engine.log(accuracy=0.5)
            said.append([line for line in lines if "logging.to names no destination" in line])
    first = "engine.log(accuracy=...): logging.to names no destination, so nothing is written; "
    assert [len(each) for each in said] == [int(my_rank() == 0), 0]
    assert all(line.startswith(first) for line in said[0])


# -- what cannot be written ------------------------------------------------------------------------


@in_ranks(cells=EACH, in_turn=True)
def test_what_cannot_be_written_is_an_error_of_prepare(backend, root):
    Path(root, "file").touch()
    assert refused(prepare, config(backend, logging=logging(f"{root}/file/logs"))).startswith(
        "ConfigError: logging.to: jsonl cannot be started: NotADirectoryError"
    )
    table.find_spec = lambda name: None
    needs = "tensorboard needs the package tensorboard; pip install 'unishard[tensorboard]', or remove tensorboard"
    told = refused(prepare, config(backend, logging=logging(root, to=["tensorboard"])))
    assert told == f"ConfigError: logging.to: {needs}"
